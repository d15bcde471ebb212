"""What Octavo was told and what follows from it by arithmetic: settings, model shapes, KV layout."""
