"""The one place that states Octavo's version."""

VERSION = "0.1.0"
