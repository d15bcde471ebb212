"""In what form weights of a GGUF file stay, alone and fused with others."""

import itertools
from pathlib import Path

from configs.gguf_file import TYPES, GGUFFile, GGUFTensor
from configs.gguf_forms import FORMS, CodeForm, LayerForms, StoredForms, common_form, form_of


def test_bytes_of_each_form() -> None:
    """Of 256 numbers. Where a type has codes of 4 or 8 bits and scales in fp16, they are those in the file."""
    found = {name: form.bytes_of(256) for name, form in FORMS.items()}
    assert found == {
        "Q4_0": 8 * 18, "Q4_1": 8 * 20, "Q5_0": 8 * 34, "Q5_1": 8 * 36, "Q8_0": 8 * 34,
        "Q4_K": 128 + 8 * 8, "Q5_K": 256 + 8 * 8, "Q6_K": 256 + 16 * 4,
    }  # fmt: skip
    for kind in TYPES.values():
        if kind.name in ("Q4_0", "Q4_1", "Q8_0"):
            assert found[kind.name] == 256 // kind.numbers * kind.num_bytes


def test_plain_numbers_have_no_form() -> None:
    assert {name for name in (kind.name for kind in TYPES.values()) if name not in FORMS} == {"F32", "F16", "BF16"}
    assert form_of(2) == FORMS["Q4_0"] and form_of(0) is form_of(30) is form_of(99) is None


def test_common_forms() -> None:
    for name, form in FORMS.items():
        assert common_form([form, form]) == form, name
        assert common_form([form, None]) is None
    assert common_form([]) is None
    assert common_form([FORMS["Q4_1"], FORMS["Q4_K"]]) == FORMS["Q4_K"]
    assert common_form([FORMS["Q5_0"], FORMS["Q8_0"]]) == FORMS["Q8_0"]
    assert common_form([FORMS["Q4_0"], FORMS["Q4_1"]]) == CodeForm(8, 0, 32, 2, True), "codes begin elsewhere"
    assert common_form([FORMS["Q4_K"], FORMS["Q6_K"]]) == CodeForm(8, 0, 16, 4, True)


def test_a_common_form_holds_each() -> None:
    for some in itertools.product(FORMS.values(), repeat=3):
        form = common_form(some)
        assert form is not None and form == common_form(reversed(some))
        for other in some:
            assert form.bits >= other.bits and other.group % form.group == 0
            assert form.scale_bytes >= other.scale_bytes and form.has_minimums >= other.has_minimums
            assert form.bits == 8 or form.lowest == other.lowest


def file_of(**kinds: int) -> GGUFFile:
    """Names of matrices, `__` for a point -> ggml type."""
    names = {f"{name.replace('__', '.')}.weight": kind for name, kind in kinds.items()}
    tensors = {name: GGUFTensor(name, (256, 256), kind, 0) for name, kind in names.items()}
    return GGUFFile(Path("m.gguf"), {}, tensors, 0)


def test_forms_of_a_file() -> None:
    """Apart and fused, Q4_K beside Q6_K and plain numbers, a head of its own."""
    file = file_of(
        token_embd=8, output=14, blk__0__attn_q=12, blk__0__attn_k=12, blk__0__attn_v=14, blk__0__attn_output=12,
        blk__0__ffn_gate=2, blk__0__ffn_up=2, blk__0__ffn_down=1, blk__1__attn_qkv=8, blk__1__attn_output=2,
        blk__1__ffn_up=3, blk__1__ffn_down=14,
    )  # fmt: skip
    first = LayerForms(CodeForm(8, 0, 16, 4, True), FORMS["Q4_K"], FORMS["Q4_0"], None)
    second = LayerForms(FORMS["Q8_0"], FORMS["Q4_0"], FORMS["Q4_1"], FORMS["Q6_K"])
    assert StoredForms.of(file, 2) == StoredForms((first, second), FORMS["Q6_K"])


def test_a_tied_head_has_the_form_of_the_embedding() -> None:
    forms = StoredForms.of(file_of(token_embd=8, blk__0__attn_q=1), 1)
    assert forms is not None and forms.head == FORMS["Q8_0"] and forms.layers[0].qkv is None


def test_a_file_of_plain_numbers_has_none() -> None:
    assert StoredForms.of(file_of(token_embd=1, blk__0__attn_q=0), 1) is None
