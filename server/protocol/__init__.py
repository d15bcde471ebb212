"""Wire shapes, one module a route family. Requests are pydantic models; answers are plain dicts that msgspec encodes.

Three rules for request fields: what is documented here and not served yet (`unsupported.py`), or is another server's
word for what would change the answer (`foreign.py`), is refused by name; what is unknown is ignored; null means absent.
"""
