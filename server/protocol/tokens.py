"""POST /tokenize and /detokenize, in vLLM's shapes."""

from server.protocol.body import Body
from server.protocol.chat import Messages, TemplateBody
from server.protocol.sampling import Ints


class TokenizeBody(TemplateBody):
    """Either `prompt` or `messages`."""

    messages: Messages | None = None
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Ints
