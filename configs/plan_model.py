"""Models beside the one at hand: a GPU's part of it, the same with fewer KV heads; and whether it can be one at all.

Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053) gives each GPU a part of the heads, of every MLP and of the
vocabulary. Each GPU must have as many heads as any other, and the KV heads that its query heads read: so it can be only
where the GPUs divide the query heads, and the KV heads too, or are a multiple of them and hold each several times.
"""

from dataclasses import replace
from pathlib import Path

from configs.decoder import DecoderConfig
from configs.errors import SettingsError, StartupError
from configs.kv import KVFormat
from configs.model import SizedConfig
from configs.probed import ProbedConfig

MAX_SHARE = 16
"""No model's heads together are so many times as wide as its hidden states; the widest known is 2."""
MAX_PARAMETERS = 10**14
MAX_WIDTH = {"hidden_size": 2**17, "intermediate_size": 2**20, "vocab_size": 2**24, "head_dim": 2**10}
"""Far above any model that exists; files that say more are damaged or made up."""


def query_heads(model: SizedConfig) -> tuple[int, ...]:
    """Of each layer."""
    if isinstance(model, ProbedConfig):
        return tuple(call.heads for call in model.calls)
    assert isinstance(model, DecoderConfig)
    return (model.num_heads,) * model.num_layers


def kv_heads(model: SizedConfig) -> tuple[int, ...]:
    """Of each layer."""
    return tuple(layer.kv_heads for layer in model.kv_layers(KVFormat.BF16))


def even_splits(model: SizedConfig) -> tuple[int, ...]:
    """Numbers of GPUs among which all heads can be split, ascending."""
    pairs = set(zip(query_heads(model), kv_heads(model), strict=True))
    counts = range(1, 1 + min(query_heads(model)))
    return tuple(n for n in counts if all(not heads % n and (not kv % n or not n % kv) for heads, kv in pairs))


def check_plausible(model: SizedConfig, path: Path) -> None:
    """Raises `StartupError` for sizes that no model has: what would be planned for them is nothing. `path`: of the
    model's folder or file."""
    where = f"--model: {path / 'config.json' if path.is_dir() else path}"
    if isinstance(model, DecoderConfig):
        for key, limit in MAX_WIDTH.items():
            if (value := getattr(model, key)) > limit:
                raise StartupError(f"{where}: {key} is {value}, and no model has more than {limit}.")
        heads = model.num_heads * model.head_dim
        if heads > MAX_SHARE * model.hidden_size:
            raise StartupError(
                f"{where}: {model.num_heads} attention heads of {model.head_dim} numbers are {heads} beside a "
                f"hidden_size of {model.hidden_size}: no model has more than {MAX_SHARE} times as many."
            )
    if model.num_parameters > MAX_PARAMETERS:
        raise StartupError(
            f"{where}: its sizes come to {model.num_parameters} parameters, and no model has more than "
            f"{MAX_PARAMETERS}."
        )


def rank_of(model: SizedConfig, ranks: int) -> SizedConfig:
    """What each of `ranks` GPUs holds. Raises `SettingsError` for a number that does not split the heads evenly."""
    if ranks not in (possible := even_splits(model)):
        words = ", ".join(map(str, possible)).rpartition(", ")
        raise SettingsError(
            f"--tp {ranks} does not split the model's {max(query_heads(model))} query and {max(kv_heads(model))} KV "
            f"heads evenly: {' or '.join(filter(None, words[::2]))} would."
        )
    if ranks == 1:
        return model
    if isinstance(model, ProbedConfig):
        calls = tuple(
            replace(call, heads=_part(call.heads, ranks), kv_heads=_part(call.kv_heads, ranks)) for call in model.calls
        )
        parameters, tied = (_part(count, ranks) for count in (model.parameters, model.tied_parameters))
        return replace(model, calls=calls, parameters=parameters, tied_parameters=tied)
    assert isinstance(model, DecoderConfig)
    return replace(
        model,
        num_heads=_part(model.num_heads, ranks),
        num_kv_heads=_part(model.num_kv_heads, ranks),
        intermediate_size=_part(model.intermediate_size, ranks),
        vocab_size=_part(model.vocab_size, ranks),
    )


def with_kv_heads(model: SizedConfig, kv_heads: int) -> SizedConfig:
    """A model of the same shape with at most so many KV heads a layer."""
    if isinstance(model, ProbedConfig):
        calls = tuple(replace(call, kv_heads=min(call.kv_heads, kv_heads)) for call in model.calls)
        return replace(model, calls=calls)
    assert isinstance(model, DecoderConfig)
    return replace(model, num_kv_heads=min(model.num_kv_heads, kv_heads))


def _part(count: int, ranks: int) -> int:
    return -(-count // ranks)
