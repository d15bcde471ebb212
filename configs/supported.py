"""From a model's files to its configuration, or to a refusal that says what was found and what is served."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from configs.decoder import FAMILIES
from configs.errors import StartupError
from configs.gguf_forms import StoredForms
from configs.model import ModelConfig, ModelFiles, architecture, declared_dtype
from configs.model_fields import MAX_SIZE, MIN_POSITIONS, Fields
from configs.model_gguf import GGUF_ARCHITECTURES
from configs.model_rope import ORIGINAL, rope_parameters

SUPPORTED = (
    f"Supported are {', '.join(FAMILIES)}, GGUF files of {', '.join(GGUF_ARCHITECTURES)}, and through the library "
    "transformers other decoders whose layers all keep keys and values of softmax attention"
)
MAX_LAYERS = 4096
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
SIZES = {
    **dict.fromkeys(LAYERS, 1),
    "hidden_size": 1,
    "intermediate_size": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 1,
    "vocab_size": 1,
    "max_position_embeddings": MIN_POSITIONS,
    "sliding_window": 1,
    "n_embd": 1,
    "n_head": 1,
    "n_inner": 1,
    "n_positions": MIN_POSITIONS,
}
"""Keys under which architectures keep a size, of those that are whole numbers wherever they stand -> the least."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
"""How many there are, and how many a token goes to: a number, in some architectures a list with one for each layer. 0:
layers without experts."""
FACTORS = (
    "rope_theta",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logits_scaling",
)
"""Keys of numbers that are above 0: they divide, scale scores or cap them."""
ATTENTION_LAYERS = ("full_attention", "sliding_attention")


def read_model(path: Path) -> ModelConfig:
    """A `DecoderConfig` for the families of ours; of others no more than the files say, checked as far as words go.

    path: a model folder or a .gguf file. Raises `StartupError` naming file, key and value for what is missing,
    senseless or not supported.
    """
    files = ModelFiles.read(path)
    check(files.config)
    family = FAMILIES.get(files.architecture)
    if family is not None:
        if _experts(files.config):
            raise refusal(files.config, "mixtures of experts are not supported in this architecture")
        model = replace(family.read(files.config), generation=files.generation)
        return model if files.gguf is None else replace(model, stored=StoredForms.of(files.gguf, model.num_layers))
    if files.gguf is not None:
        raise refusal(files.config, "this architecture is not supported as GGUF")
    return ModelConfig(
        files.architecture, files.config.integer("vocab_size"), declared_dtype(files.config), files.generation
    )


def check(config: Fields) -> None:
    """Raises `StartupError` for what nothing here can run, and for what is no size, name or number at all."""
    _check_values(config)
    for applies, words in WRONG_FILES:
        if found := applies(config):
            raise StartupError(f"--model: {config.where} ({architecture(config)}): {words.format(found=found)}.")
    for applies, words in REFUSALS:
        if found := applies(config):
            raise refusal(config, words.format(found=found))


def _check_values(config: Fields) -> None:
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise config.wrong("architectures", "a list of names")
    if architecture(config) in FAMILIES:
        return  # a family of ours says itself what it needs
    slides = config.get("use_sliding_window") is not False  # transformers writes a window of 0 where it is
    for key, least in SIZES.items():
        config.integer(key, default=least, low=0 if key == "sliding_window" and not slides else least)
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads is not None and kv_heads is not None and heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    _check_experts(config)
    rope = rope_parameters(config)
    rope.integer(ORIGINAL, default=1)
    for fields, keys in ((config, FACTORS), (rope, ("factor",))):
        for key in keys:
            fields.positive(key, default=1.0)


def _check_experts(config: Fields) -> None:
    """A token goes to one expert at least, where there are any, and to no more than there are."""
    one_number = {key: value for key, value in config.values.items() if not isinstance(value, list | None)}
    experts, chosen = ([key for key in keys if key in one_number] for keys in (EXPERTS, CHOSEN_EXPERTS))
    count = min((config.integer(key, low=0) for key in experts), default=None)
    for key in chosen:
        if config.integer(key, low=1 if count else 0) > (MAX_SIZE if count is None else count):
            raise config.wrong(key, f"at most {experts[0]} ({count})")


def refusal(config: Fields, words: str) -> StartupError:
    return StartupError(f"--model: {config.where} ({architecture(config)}): {words}. {SUPPORTED}.")


# ------------------------------------------------------------------ what is refused, and why
def _quantisation(config: Fields) -> str:
    """Method by which the weights are quantised, "" if they are not."""
    for key in ("quantization_config", "compression_config"):
        if given := config.get(key):
            return str(given.get("quant_method", "?")) if isinstance(given, dict) else "?"
    return ""


def _other_layers(config: Fields) -> str:
    """Kinds of layers that are no attention over a growing context (linear attention, convolutions, ...). A family of
    ours says itself what it knows."""
    if architecture(config) in FAMILIES:
        return ""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if not isinstance(kinds, list):
        return ""
    return ", ".join(sorted({str(kind) for kind in kinds} - {*ATTENTION_LAYERS, "attention"}))


def _layers(config: Fields) -> object:
    """A number of layers that no model has; to build them would take all memory."""
    counts = (config.get(key) for key in LAYERS)
    return next((count for count in counts if isinstance(count, int) and count > MAX_LAYERS), None)


def _experts(config: Fields) -> bool:
    return any(config.get(key) for key in EXPERTS)


def _given(*keys: str) -> Callable[[Fields], object]:
    return lambda config: next((key for key in keys if config.get(key)), None)


Rule = tuple[Callable[[Fields], object], str]
"""(finds it, words)"""
WRONG_FILES: tuple[Rule, ...] = (
    (
        lambda c: c.get("num_files") not in (None, 0, 1),
        "the GGUF is split into several files: join them with llama-gguf-split --merge",
    ),
    (_quantisation, "its weights are quantised ({found}): take the bf16, fp16 or fp32 weights, or a GGUF file"),
)
REFUSALS: tuple[Rule, ...] = (
    (_layers, f"{{found}} layers are too many: at most {MAX_LAYERS} are built"),
    (lambda c: c.get("is_encoder_decoder"), "encoder-decoder models are not supported"),
    (
        _given("vision_config", "audio_config", "text_config"),
        "models for images or sound are not supported (it has a {found})",
    ),
    (_given("kv_lora_rank"), "multi-head latent attention is not supported (it has a {found})"),
    (_other_layers, "layers of the kind {found} are not supported"),
    (_given("num_kv_shared_layers"), "layers that share keys and values are not supported (it has {found})"),
)
