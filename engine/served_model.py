"""What the API process knows of the model: names and text, no weights, no torch."""

from dataclasses import asdict, dataclass
from pathlib import Path

from configs.errors import reason_of
from configs.settings import SECRET_FIELDS, Settings
from configs.supported import read_model
from engine.errors import StartupError
from engine.messages import Launch
from engine.source import ModelSource
from engine.text.chat_template import ChatRenderer
from engine.text.sample import FIT_TOKENS, SAMPLE, TRIED_TOKENS
from engine.text.tokenizer import Tokenizer

MAX_TEMPLATE_BYTES = 1 << 20
"""Of the text with which the engine tries the KV cache's format."""


@dataclass(frozen=True)
class ServedModel:
    names: tuple[str, ...]
    """Ids that requests may use; the first one is shown."""
    tokenizer: Tokenizer
    chat: ChatRenderer
    generation_defaults: dict[str, float]
    """Sampling values of generation_config.json, by `SamplingParams` field."""

    @property
    def name(self) -> str:
        return self.names[0]

    @classmethod
    def load(cls, source: ModelSource, settings: Settings) -> "ServedModel":
        """Raises `StartupError` for an unreadable tokenizer, template or configuration."""
        config = read_model(source.path)
        tokenizer = Tokenizer.load(source)
        if source.tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
            raise StartupError(
                f"--tokenizer {settings.tokenizer} has {tokenizer.vocab_size} tokens and --model {source.name} "
                f"{config.vocab_size}: they do not belong together."
            )
        defaults = {key: value for key, value in asdict(config.generation).items() if value is not None}
        if "max_new_tokens" in defaults:
            defaults["max_tokens"] = defaults.pop("max_new_tokens")
        names = settings.served_model_name or (source.name,)
        return cls(names, tokenizer, ChatRenderer(tokenizer, _template(settings.chat_template)), defaults)

    def launch(self, source: ModelSource, settings: Settings) -> Launch:
        """What the engine is told. It never learns keys and passwords."""
        values = settings.model_dump(mode="json", exclude=set(SECRET_FIELDS))
        sample = self.tokenizer.encode(SAMPLE, add_special_tokens=True)[: TRIED_TOKENS + FIT_TOKENS]
        texts = sample[:TRIED_TOKENS], sample[TRIED_TOKENS:]
        return Launch(str(source.path), source.name, values, self.tokenizer.eos_token_ids, *texts)


def _template(value: str | None) -> str | None:
    """--chat-template: a file, or the template itself; None: the model's own."""
    if value is None or "{%" in value or "{{" in value:
        return value
    path = Path(value)
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise StartupError(f"--chat-template {value} is larger than {MAX_TEMPLATE_BYTES} bytes.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--chat-template {value} cannot be read: {reason_of(error)}.") from None
