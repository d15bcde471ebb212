"""Rotary position encoding as a model declares it: `rope_parameters` of config.json, `rope_scaling` of older files."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from configs.model_fields import Fields

RopeKind = Literal["none", "linear", "llama3", "yarn", "dynamic", "longrope", "divisors"]


class GGUFRope(Enum):
    """A `rope_type` that GGUF files come to and config.json cannot have: it is no text."""

    DIVISORS = "divisors"


ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position encoding (Su et al. 2021) and its scaling to longer windows.

    linear: all frequencies divided by `factor`. dynamic: base grown with the window (NTK). llama3: low frequencies
    divided, smoothly. yarn (Peng et al. 2023): a ramp between divided and plain. longrope (Ding et al. 2024): one
    divisor a frequency, of two sets, by whether the window goes beyond training's. divisors: one divisor a frequency.
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_max_position: int = 0
    """Window of the first training, where `kind` asks for it."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: the ramp's ends are whole dimensions."""
    attention_factor: float = 1.0
    """yarn, longrope: multiplies cos and sin."""
    divisors: tuple[float, ...] = ()
    """divisors; longrope: those of windows up to `original_max_position`."""
    long_divisors: tuple[float, ...] = ()
    """longrope: those of longer windows."""


@dataclass(frozen=True)
class RopeContext:
    """What the scalings need to know of the model."""

    config: Fields
    max_position: int
    rotary_dim: int
    theta: float
    """Base where the parameters name none."""


def rope_parameters(config: Fields) -> Fields:
    """transformers 5 writes `rope_parameters`; older files have `rope_scaling` beside `rope_theta`."""
    return config.nested("rope_parameters" if config.get("rope_parameters") else "rope_scaling")


def read_theta(fields: Fields, key: str, default: float) -> float:
    theta = fields.positive(key, default=default)
    if theta <= 1.0:
        raise fields.wrong(key, "above 1")
    return theta


def windows(kind: str, factor: float, original: int, max_position: int) -> tuple[int, int]:
    """(tokens of context served by default, tokens that may be asked for) of a scaling by `factor`.

    original: tokens of the window before it was scaled; max_position: of the window that the model declares. YaRN's is
    the larger of both ways to say it; linear and dynamic scaling stretch on request.
    """
    if kind == "yarn":
        max_position = max(max_position, int(factor * original))
    return max_position, int(max_position * factor) if kind in ("linear", "dynamic") else max_position


def read_rope(context: RopeContext, given: Fields) -> RopeConfig:
    """`given`: the parameters. Raises `StartupError` naming what is senseless."""
    if any(isinstance(value, dict) for value in given.values.values()):
        raise context.config.wrong("rope_parameters", "the same for all layers")
    theta = read_theta(given, "rope_theta", context.theta)
    key = "rope_type" if given.get("rope_type") else "type"
    kind = given.get(key)
    if kind in (None, "none", "default"):
        return RopeConfig("none", theta)
    if not isinstance(kind, str | GGUFRope) or kind not in READERS:
        raise given.wrong(key, f"one of default, {', '.join(name for name in READERS if isinstance(name, str))}")
    return READERS[kind](context, given, theta)


def _original(context: RopeContext, given: Fields) -> int:
    holder = context.config if context.config.get(ORIGINAL) is not None else given
    return holder.integer(ORIGINAL, default=context.max_position)


def _linear(context: RopeContext, given: Fields, theta: float) -> RopeConfig:
    return RopeConfig("linear", theta, given.number("factor", low=1.0))


def _dynamic(context: RopeContext, given: Fields, theta: float) -> RopeConfig:
    return RopeConfig("dynamic", theta, given.number("factor", low=1.0))


def _divisors(context: RopeContext, given: Fields, theta: float) -> RopeConfig:
    return RopeConfig("divisors", theta, divisors=_frequencies(given, "divisors", context.rotary_dim // 2))


def _llama3(context: RopeContext, given: Fields, theta: float) -> RopeConfig:
    low, high = given.positive("low_freq_factor"), given.positive("high_freq_factor")
    if high <= low:
        raise given.wrong("high_freq_factor", f"above low_freq_factor ({low:g})")
    factor, original = given.number("factor", low=1.0), _original(context, given)
    return RopeConfig("llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high)


def _yarn(context: RopeContext, given: Fields, theta: float) -> RopeConfig:
    original = _original(context, given)
    factor = given.number("factor", default=context.max_position / original, low=1.0)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=given.positive("beta_fast", default=32.0),
        beta_slow=given.positive("beta_slow", default=1.0),
        truncate=given.flag("truncate", default=True),
        attention_factor=_yarn_attention_factor(given, factor),
    )


def _yarn_attention_factor(given: Fields, factor: float) -> float:
    """YaRN's temperature on the attention scores, applied to cos and sin (arXiv:2309.00071, eq. 22)."""
    if given.get("attention_factor") is not None:
        return given.positive("attention_factor")

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale(given.number("mscale")) / scale(given.number("mscale_all_dim"))
    return scale(1.0)


def _longrope(context: RopeContext, given: Fields, theta: float) -> RopeConfig:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753), scores scaled as in Phi-3."""
    original, count = _original(context, given), context.rotary_dim // 2
    factor = given.number("factor", default=max(1.0, context.max_position / original), low=1.0)
    default = 1.0 if factor == 1.0 or original == 1 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    return RopeConfig(
        "longrope",
        theta,
        factor,
        original,
        attention_factor=given.positive("attention_factor", default=default),
        divisors=_frequencies(given, "short_factor", count),
        long_divisors=_frequencies(given, "long_factor", count),
    )


def _frequencies(given: Fields, key: str, count: int) -> tuple[float, ...]:
    """One positive number a frequency."""
    values = given.get(key)
    if not isinstance(values, list | tuple) or len(values) != count or not all(map(_is_positive, values)):
        raise given.wrong(key, f"{count} positive numbers")
    return tuple(float(value) for value in values)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


READERS: dict[str | GGUFRope, Callable[[RopeContext, Fields, float], RopeConfig]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    GGUFRope.DIVISORS: _divisors,
}
"""Kind of scaling -> its reader; `su`: longrope in early files"""
