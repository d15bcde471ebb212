"""Wire shapes, one module a route family. Requests are pydantic models; answers are plain dicts that msgspec encodes.

Three rules for request fields: what is documented here and not served yet is refused by name (`unsupported.py`), what
is unknown is ignored, and null means absent.
"""
