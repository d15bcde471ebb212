"""The offline class: the same core, without HTTP."""

import json
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny_models

import engine
from engine import LLM, SamplingParams
from engine.errors import ContextLengthExceeded, InvalidRequest, StartupError


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tiny_models.build(tmp_path_factory.mktemp("tiny"))
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=64, max_num_seqs=8, num_threads=1)
    yield llm
    llm.shutdown()
    llm.shutdown()


ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_generate_keeps_the_order_and_mixes_text_with_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode("second", add_special_tokens=True)
    first, second = llm.generate(["first", ids], GREEDY)
    assert first.prompt == "first" and second.prompt is None and second.prompt_token_ids == ids
    assert llm.generate("second", GREEDY)[0].outputs[0].token_ids == second.outputs[0].token_ids
    assert all(
        len(one.outputs[0].token_ids) == 12 and one.outputs[0].finish_reason == "length" for one in (first, second)
    )


def test_one_prompt_may_be_a_list_of_ids(llm: LLM) -> None:
    [result] = llm.generate([65, 66, 67], GREEDY)
    assert result.prompt_token_ids == [65, 66, 67]


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [GREEDY, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)]
    lengths = [len(one.outputs[0].token_ids) for one in llm.generate(["a", "b"], params)]
    assert lengths == [12, 3]
    with pytest.raises(ValueError, match="2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


def test_choices_share_the_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    [result] = llm.generate("many answers to one question", params)
    assert [choice.index for choice in result.outputs] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in result.outputs}) > 1
    again = llm.generate("many answers to one question", params)[0]
    assert [choice.token_ids for choice in again.outputs] == [choice.token_ids for choice in result.outputs]


def test_a_stop_string_ends_a_choice_and_gives_its_pages_back(llm: LLM) -> None:
    [free] = llm.generate("stop me", GREEDY)
    text = free.outputs[0].text
    assert len(text) > 2
    stop = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, stop=(text[1:3],))
    [result] = llm.generate("stop me", stop)
    assert result.outputs[0].text == text[: text.index(text[1:3])]
    assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == ("stop", text[1:3])
    assert llm.memory_stats()["used_pages"] == 0


def test_cached_tokens_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2)
    prompt = "$ begins like no other prompt and is longer than a page"
    cold, warm = (llm.generate(prompt, params)[0] for _ in range(2))
    assert cold.cached_tokens == 0 and warm.cached_tokens == len(cold.prompt_token_ids) - 1
    assert cold.outputs == warm.outputs
    assert cold.outputs[0].logprobs is not None and len(cold.outputs[0].logprobs) == 4


def test_log_probabilities_of_the_prompt(llm: LLM) -> None:
    """Scored as text, and as what was generated."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    [written] = llm.generate("one text", params)
    assert written.prompt_logprobs is None
    ids = written.prompt_token_ids + written.outputs[0].token_ids
    [scored] = llm.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=2))
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == len(ids) - 1
    assert [one.logprob for one in scored.prompt_logprobs[-6:]] == [one.logprob for one in written.outputs[0].logprobs]
    assert all(len(one.top_ids) == 2 for one in scored.prompt_logprobs)


def test_chat(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "hello"}], GREEDY)
    assert len(answer.outputs[0].token_ids) == 12


def test_memory_stats_and_events(llm: LLM) -> None:
    stats = llm.memory_stats()
    assert set(stats) == {
        "total_pages", "used_pages", "cached_pages", "free_pages", "utilization", "slot_utilization",
        "active_requests", "bytes_per_page", "bytes_per_token", "total_bytes",
    }  # fmt: skip
    assert stats["total_pages"] == 64 and stats["used_pages"] == stats["active_requests"] == 0
    assert stats["free_pages"] + stats["cached_pages"] == 64
    assert stats["total_bytes"] == 64 * stats["bytes_per_page"]
    assert {event["kind"] for event in llm.events()} >= {"allocation", "hit", "miss"}


def test_what_is_wrong_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded):
        llm.generate([[1] * 512], GREEDY)
    with pytest.raises(InvalidRequest, match="260"):
        llm.generate([[260]], GREEDY)
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate([[]], GREEDY)
    assert llm.memory_stats()["active_requests"] == 0


def test_no_prompts(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_unknown_setting() -> None:
    with pytest.raises(StartupError, match="max_model_len"):
        LLM(max_model_length=5)


def test_a_model_may_be_a_path_and_not_bytes(tmp_path: Path) -> None:
    folder = tiny_models.build(tmp_path)
    with LLM(folder, dtype="float32", num_gpu_blocks_override=16, num_threads=1) as llm:
        assert llm.info.summary["model"].startswith(str(folder))
    for wrong in (b"x", 5, ["x"]):
        with pytest.raises(StartupError, match=rf"^--model must be a valid string, got {re.escape(repr(wrong))}\.$"):
            LLM(wrong)  # type: ignore[arg-type]
    with pytest.raises(StartupError, match=r"^--model must not be empty"):
        LLM(" ")


def test_the_end_of_a_with_block_frees_the_model(tmp_path: Path) -> None:
    with LLM(str(tiny_models.build(tmp_path)), dtype="float32", num_gpu_blocks_override=16, num_threads=1) as llm:
        core = weakref.ref(llm._core)
        assert llm.generate("x", GREEDY)[0].outputs[0].finish_reason == "length"
    assert core() is None
    llm.shutdown()
    for use in (lambda: llm.generate("x"), lambda: llm.chat([{"role": "user", "content": "x"}]), llm.memory_stats):
        with pytest.raises(RuntimeError, match="has been shut down"):
            use()


def test_a_gpu_gets_the_memory_back_when_model_and_pool_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would keep it for tensors to come. Here the GPU is said to be used, and the runner to be in a cycle."""
    are_gone = []
    with LLM(str(tiny_models.build(tmp_path)), dtype="float32", num_gpu_blocks_override=16, num_threads=1) as llm:
        runner = llm._core._executor.runner
        kept = weakref.ref(runner.model), weakref.ref(runner.pools[0])
        runner.itself = runner  # type: ignore[attr-defined]
        del runner
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
        monkeypatch.setattr("torch.cuda.empty_cache", lambda: are_gone.append([each() is None for each in kept]))
    llm.shutdown()
    assert are_gone == [[True, True]]


def test_an_interrupted_step_shuts_the_engine_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than go on with parts that are at odds."""
    with LLM(str(tiny_models.build(tmp_path)), dtype="float32", num_gpu_blocks_override=32, num_threads=1) as llm:
        assert llm._built is not None
        executor, steps = llm._built._executor, iter(range(5))
        sample = executor.sample

        def interrupted(*arguments: Any) -> Any:
            if next(steps) == 3:
                raise KeyboardInterrupt
            return sample(*arguments)

        monkeypatch.setattr(executor, "sample", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["one", "two"], GREEDY)
        with pytest.raises(RuntimeError, match="has been shut down"):
            llm.generate("three", GREEDY)


def test_an_error_in_a_with_block_frees_the_model_too(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        LLM(str(tiny_models.build(tmp_path)), dtype="float32", num_gpu_blocks_override=16, num_threads=1) as llm,
    ):
        _ = 1 / 0
    with pytest.raises(RuntimeError, match="has been shut down"):
        llm.events()


def test_dir_lists_what_has_not_been_used_yet() -> None:
    program = "import engine, sys; print(*dir(engine)); assert 'torch' not in sys.modules"
    listed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert {*engine.__all__, "__name__", "__all__"} <= set(listed.stdout.split())


def test_the_tokenizers_own_end_token_ends_a_sequence(tmp_path: Path) -> None:
    """Chat fine-tunes often name it in tokenizer_config.json alone."""
    folder = tiny_models.build(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    end = tiny_models.EOS - 1
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": tiny_models.SPECIAL_TOKENS[end]}))
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=16, num_threads=1)
    try:
        for token in (end, tiny_models.EOS):
            forced = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={token: 100.0})
            [choice] = llm.generate("x", forced)[0].outputs
            assert (choice.finish_reason, choice.token_ids) == ("stop", [token])
    finally:
        llm.shutdown()


def test_a_text_among_token_ids_is_refused(llm: LLM) -> None:
    with pytest.raises(TypeError, match="token ids among them"):
        llm.generate([65, "text"], GREEDY)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("prompts", "got"),
    [
        (None, "got NoneType"),
        (5, "got int"),
        (b"text", "got bytes"),
        ({"prompt": "text"}, "got dict"),
        ([{"prompt": "text"}], "got dict among them"),
        ([[65.0]], "got float among token ids"),
        ([["65"]], "got str among token ids"),
        ([[True]], "got bool among token ids"),
        ([65, True], "got token ids among them"),
    ],
)
def test_what_is_no_prompt_is_refused_in_words(llm: LLM, prompts: Any, got: str) -> None:
    with pytest.raises(TypeError, match=rf"^prompts must be texts and lists of token ids, or one list of ids; {got}$"):
        llm.generate(prompts, GREEDY)


def test_prompts_may_be_anything_that_can_be_gone_through(llm: LLM) -> None:
    expected = [one.outputs for one in llm.generate(["a", "b"], GREEDY)]
    for prompts in (("a", "b"), (text for text in "ab"), ([97], (98,)), numpy.array([[97], [98]])):
        assert [one.outputs for one in llm.generate(prompts, GREEDY)] == expected
    assert [one.outputs for one in llm.generate(numpy.array([97]), GREEDY)] == expected[:1]


def test_params_of_another_kind(llm: LLM) -> None:
    for params in ({"max_tokens": 3}, [{"max_tokens": 3}], {}, 0, False, "x"):
        for prompts in ("a", []):
            with pytest.raises(TypeError, match=r"^params must be SamplingParams"):
                llm.generate(prompts, params)  # type: ignore[arg-type]
    for params in ([], ()):
        with pytest.raises(ValueError, match="1 prompts need"):
            llm.generate("a", params)
    with pytest.raises(TypeError, match=r"^params must be SamplingParams, got str"):
        llm.chat([{"role": "user", "content": "hello"}], "x")  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [-1, "a"])
def test_a_limit_that_is_no_number_of_events(llm: LLM, limit: Any) -> None:
    with pytest.raises(ValueError, match=f"^limit must be a number of events, got {limit!r}"):
        llm.events(limit)


def test_a_second_thread_is_told_to_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """From inside a step of the first call, where the engine could not take another."""
    step, refused = llm._core.step, []

    def also_generate() -> Any:
        with pytest.raises(RuntimeError, match="is answering another thread") as error:
            llm.generate(["b"], GREEDY)
        refused.append(error)
        return step()

    monkeypatch.setattr(llm._core, "step", also_generate)
    assert llm.generate(["a"], GREEDY)[0].outputs[0].token_ids and refused
    monkeypatch.undo()
    assert llm.generate(["b"], GREEDY)[0].outputs[0].token_ids
