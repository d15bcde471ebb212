"""One module a family of routes, each with its `router`; `app.py` lists them."""
