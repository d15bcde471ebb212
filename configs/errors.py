"""Errors that settings and model files can raise. They stand here because `configs` imports nothing of ours;
`engine/errors.py` has the others and exports these too."""


class OctavoError(Exception):
    """Base of all deliberate errors."""


class StartupError(OctavoError):
    """The server cannot start: one sentence that names the flag to change. Exit code 2, no traceback."""


class SettingsError(StartupError):
    """A setting is unknown, has an impossible value or asks for more than there is. The sentence names the setting."""


def reason_of(error: BaseException) -> str:
    """What somebody else's error says, as the end of a sentence of ours: on one line, without a full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def shown(value: object, limit: int = 60) -> str:
    """A value in a sentence, at most `limit` characters of it, whatever it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; lists in lists in lists
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= limit else text[: limit - 1] + "…"
