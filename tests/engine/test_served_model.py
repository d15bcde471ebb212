"""What the API process knows of the model: --tokenizer, secrets that stay where they are."""

import json
import shutil
from pathlib import Path

import pytest
import tiny_models

from configs.settings import SECRET_FIELDS, Settings
from engine.errors import StartupError
from engine.served_model import ServedModel
from engine.source import resolve


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("served-model") / "tiny")


def other_tokenizer(folder: Path, vocab_size: int = 260) -> Path:
    """With another template and another end of sequence."""
    folder.mkdir()
    tiny_models.write_tokenizer(folder, vocab_size)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    changed = {"chat_template": "another template", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changed))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


def load(**settings: object) -> ServedModel:
    given = Settings.create(settings)
    return ServedModel.load(resolve(given), given)


def test_a_tokenizer_in_place_of_the_models(model: Path, tmp_path: Path) -> None:
    own = load(model=str(model))
    served = load(model=str(model), tokenizer=str(other_tokenizer(tmp_path / "t")))
    assert served.tokenizer.chat_template == "another template" != own.tokenizer.chat_template
    assert served.name == str(model)
    assert set(served.tokenizer.eos_token_ids) == {*own.tokenizer.eos_token_ids, tiny_models.IM_END}, "both end it"


def test_the_model_needs_no_tokenizer_of_its_own(model: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    with pytest.raises(StartupError, match=r"has no tokenizer\.json"):
        load(model=str(bare))
    assert load(model=str(bare), tokenizer=str(model)).tokenizer.vocab_size == 260


def test_a_tokenizer_of_another_model(model: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"^--tokenizer .* has 300 tokens and --model .* 260: they do not belong"):
        load(model=str(model), tokenizer=str(other_tokenizer(tmp_path / "t", 300)))


def test_a_folder_that_is_no_tokenizer(model: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"^--tokenizer .* has no tokenizer\.json"):
        load(model=str(model), tokenizer=str(tmp_path))


def test_the_engine_learns_no_secrets(model: Path) -> None:
    given = Settings.create(
        {"model": str(model), **dict.fromkeys(SECRET_FIELDS - {"api_key"}, "s3cret"), "api_key": "k3y"}
    )
    source = resolve(given)
    values = ServedModel.load(source, given).launch(source, given).settings
    assert not SECRET_FIELDS & values.keys() and "s3cret" not in str(values) and "k3y" not in str(values)
    Settings.create(values)
