"""The GGUF header reader against the `gguf` package, and against damage."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import StartupError
from configs.gguf_file import OTHER_TYPES, TYPES, GGUFFile, GGUFTensor


def write(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.count", 7)
    writer.add_float32("a.eps", 1e-5)
    writer.add_float64("a.wide", 0.1)
    writer.add_bool("a.flag", True)
    writer.add_int64("a.negative", -(2**40))
    writer.add_string("a.text", "naïve ☃")
    writer.add_array("a.words", ["", "one", "two ☃"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 1.5])
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf").read_bytes()


def test_reads_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    file, reader = GGUFFile.read(path), gguf.GGUFReader(path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == theirs and len(theirs) == 10
    assert list(file.tensors.values()) == [
        GGUFTensor(tensor.name, tuple(reversed(tensor.shape.tolist())), tensor.tensor_type, tensor.data_offset)
        for tensor in reader.tensors
    ]
    assert file.size == path.stat().st_size
    tensor = file.tensors["first"]
    data = np.frombuffer(path.read_bytes(), np.float32, 6, tensor.offset)
    assert tensor.shape == (2, 3) and data.tolist() == [0, 1, 2, 3, 4, 5]


def test_other_alignment(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(128)
    writer.add_tensor("only", np.ones(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GGUFFile.read(path).tensors["only"].offset == gguf.GGUFReader(path).tensors[0].data_offset


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cannot be read as GGUF"),
        (b"PK\x03\x04 a zip", "is not a GGUF file"),
        (b"GGUF\x01\0\0\0", "GGUF version 1"),
        (b"GGUF\0\0\0\x03" + bytes(20), "GGUF version 50331648"),
        (b"GGUF\x03\0\0\0", "its header ends early"),
        (b"GGUF" + struct.pack("<IQQQcIQ", 3, 0, 1, 1, b"k", 8, 100) + b"short", "its header ends early"),
    ],
)
def test_what_is_not_gguf(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(StartupError, match=words):
        GGUFFile.read(path)
    with pytest.raises(StartupError, match="cannot be read as GGUF"):
        GGUFFile.read(tmp_path / "missing.gguf")


def test_every_cut_of_the_header_is_seen(written: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(written)
    data_start = GGUFFile.read(path).tensors["first"].offset
    for length in range(0, data_start - 31, 7):  # up to 31 bytes of padding lie before the data
        path.write_bytes(written[:length])
        with pytest.raises(StartupError):
            GGUFFile.read(path)


@settings(deadline=None)
@given(position=st.integers(4, 500), value=st.integers(0, 255))
def test_damage_is_read_or_refused(
    position: int, value: int, written: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A changed byte ends in a StartupError or in some header, never in another error or a hang."""
    data = bytearray(written)
    data[min(position, len(data) - 1)] = value
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data)
    try:
        GGUFFile.read(path)
    except StartupError as error:
        assert "--model" in str(error)


# ------------------------------------------------------------------ tensors
def test_types_are_those_of_the_gguf_package() -> None:
    for number, kind in TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (kind.name, (kind.numbers, kind.num_bytes)) == (theirs.name, gguf.GGML_QUANT_SIZES[theirs])
    known = {theirs.value: theirs.name for theirs in gguf.GGMLQuantizationType}
    assert {number: known[number] for number in OTHER_TYPES} == OTHER_TYPES and not OTHER_TYPES.keys() & TYPES.keys()


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType(number) for number in TYPES], ids=lambda kind: kind.name)
def test_a_file_is_complete_to_the_last_byte(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.zeros((3, 512 // block * size), np.uint8)
    writer.add_tensor("a", data, raw_shape=data.shape, raw_dtype=kind)
    writer.add_tensor("last", data, raw_shape=data.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    last = GGUFFile.read(path).tensors["last"]
    end = last.offset + data.nbytes
    whole = path.read_bytes()
    for length in (len(whole), end, end - 1, last.offset):
        path.write_bytes(whole[:length])
        file = GGUFFile.read(path)
        assert file.bytes_of(file.tensors["last"]) == data.nbytes
        if length >= end:
            file.check_tensors()
            continue
        with pytest.raises(StartupError, match=rf"is incomplete: it ends at byte {length}, before last does; fetch it"):
            file.check_tensors()


@pytest.mark.parametrize(
    ("kind", "shape", "words"),
    [
        (10, (256,), "a is stored as Q2_K; read are F32, F16, BF16, Q4_0"),
        (99, (256,), "a is stored as type 99; read are F32"),
        (2, (31,), "is damaged: a has shape [31]"),
        (0, (), "is damaged: a has shape []"),
    ],
)
def test_tensors_that_are_not_read(kind: int, shape: tuple[int, ...], words: str, tmp_path: Path) -> None:
    file = GGUFFile(tmp_path / "m.gguf", {}, {"a": GGUFTensor("a", shape, kind, 0)}, 10**6)
    with pytest.raises(StartupError) as caught:
        file.check_tensors()
    assert words in str(caught.value) and "m.gguf" in str(caught.value)
