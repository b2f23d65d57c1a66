import itertools
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from seatrial.model import UsageError
from seatrial.train import data, data_cache, markov, ranks, text
from seatrial.train.blocks import IGNORE_INDEX
from seatrial.train.train_config import TrainConfig
from tests.train.ranks import FORK

ROWS: list[Any] = [
    {"text": "The ship sails at dawn, and the crew is ready."},
    {"instruction": "Name a port.", "input": "", "output": "Rotterdam"},
    {"instruction": "Translate.", "input": "ahoj", "output": "ahoy"},
    {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]},
]


def settings(**changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {"run_name": "t", "seq_len": 8, "model": {"name": "qwen2-tiny"}, "untimed_steps": 0}
    return TrainConfig.model_validate({**fields, **changes})


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(config: TrainConfig, folder: Path) -> data.Blocks:
    return data.prepare(config, folder)


def test_generated_data_has_a_known_entropy_bound(tmp_path: Path) -> None:
    blocks = prepare(settings(data={"samples": 5}), tmp_path)
    assert blocks.batch([3, 1]).shape == (2, 9)
    assert blocks.info.entropy_bound == markov.ENTROPY
    assert blocks.batch([0, 1, 2, 3, 4]).equal(markov.generate_sequences(5, 9, 0))


def test_variable_length_sequences_end_in_ignored_padding(tmp_path: Path) -> None:
    blocks = prepare(settings(data={"samples": 200, "variable_length": True}), tmp_path)
    whole = markov.generate_sequences(200, 9, 0).numpy()
    padded = blocks.tokens == IGNORE_INDEX
    lengths = (~padded).sum(1) - 1
    assert set(lengths) == set(range(1, 9))
    assert (padded == (np.arange(9) > lengths[:, None])).all()
    assert (blocks.tokens == whole)[~padded].all()
    assert blocks.info.tokens == lengths.sum()
    with pytest.raises(ValueError, match="variable_length requires generated data"):
        settings(data={"path": "rows.jsonl", "variable_length": True})


def test_rows_are_packed_without_token_loss(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS * 3)
    blocks = prepare(settings(data={"path": str(path)}), tmp_path)
    rows = text.read_rows(path, None)
    encoder = text.train_tokenizer(rows, 257, [text.END_TOKEN])
    whole = list(itertools.chain.from_iterable(text.encode(encoder, rows)))
    assert blocks.tokens.flatten().tolist() == whole[: blocks.tokens.size]
    assert len(whole) - blocks.tokens.size < 9
    assert encoder.decode(whole[: len(text.encode(encoder, rows)[0]) - 1]) == ROWS[0]["text"]
    assert blocks.info.entropy_bound is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": \n', "row 2 is not valid JSON"),
        ('{"text": "a"}\n{"prompt": "b"}\n', r"row 2: expected text, .* \(got prompt\)"),
        ("7\n", r"row 1: .* \(got int\)"),
        ('{"messages": [{"role": "user"}]}\n', "row 1: a message needs role and content"),
        ("", "has no rows"),
        ('{"text": "a"}\n{"text": "\xe9"}\n', "row 2 is not UTF-8"),  # encoded as Latin-1
        ('{"text": "a"}\n\0\0\0', "row 2 is not valid JSON"),  # zeros of an incomplete write
        ('{"text": "\\ud800"}\n', "row 1 contains a lone surrogate"),
        ('{"text": ' + "[" * 100_000, "row 1 is not valid JSON"),
        ('{"text": "a"}\n', "fewer than one sequence"),
    ],
)
def test_errors_name_the_damaged_row(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(UsageError, match=message):
        prepare(settings(data={"path": str(path)}), tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]


def test_unusable_data_and_tokenizers_are_errors(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(UsageError, match="cannot read the data"):
        prepare(settings(data={"path": str(tmp_path / "none.jsonl")}), tmp_path)
    with pytest.raises(UsageError, match="cannot read the tokenizer"):
        prepare(settings(data={"path": str(path), "tokenizer": str(path)}), tmp_path)
    tokenizer = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({"a": 0, "<|endoftext|>": 1})).save(str(tokenizer))  # no token for unknown words
    with pytest.raises(UsageError, match=r"the tokenizer cannot encode the rows: .*UNK"):
        prepare(settings(data={"path": str(path), "tokenizer": str(tokenizer)}), tmp_path)
    with pytest.raises(UsageError, match="vocab_size 256: expected at least 257"):
        prepare(settings(model={"name": "mistral-tiny"}, data={"path": str(path)}), tmp_path)


def test_a_node_without_shared_cache_generates_data_but_reads_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(settings(), tmp_path / "first")
    unseen = data_cache.Prepared(tmp_path / "unseen", hit=True, message="")
    monkeypatch.setattr(ranks, "run_on_rank0", lambda *_: unseen)
    assert (prepare(settings(), tmp_path / "other").tokens == first.tokens).all()
    rows = settings(data={"path": str(write(tmp_path / "rows.jsonl", [{"text": "a b"}] * 9))})
    with pytest.raises(UsageError, match=r"data\.cache"):
        prepare(rows, tmp_path / "third")


def test_blocks_are_cached_by_settings(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS * 3)
    for config in (settings(), settings(), settings(seq_len=9), settings(data={"path": str(path)})):
        prepare(config, tmp_path)
    write(path, ROWS * 4)
    prepare(settings(data={"path": str(path)}), tmp_path)
    assert len(list(tmp_path.glob("blocks-*"))) == 4


@pytest.mark.parametrize(("blocks", "ranks"), [(12, 4), (13, 4), (7, 7), (5, 1)])
def test_the_blocks_of_all_ranks_are_disjoint(blocks: int, ranks: int) -> None:
    per_rank = blocks // ranks
    for epoch in (0, 1):
        indices = [
            index
            for rank in range(ranks)
            for index in itertools.islice(data.block_order(blocks, rank, ranks, 3, skip=epoch * per_rank), per_rank)
        ]
        assert len(set(indices)) == len(indices) == per_rank * ranks


def test_block_order_depends_on_epoch_and_seed_and_resumes() -> None:
    def reads(seed: int, skip: int = 0) -> list[int]:
        return list(itertools.islice(data.block_order(20, 1, 2, seed, skip), 20))

    assert reads(0) == reads(0) != reads(1)
    assert reads(0)[:10] != reads(0)[10:]
    assert sorted(reads(0)[:10]) != sorted(reads(0)[10:])  # different blocks
    assert reads(0)[13:] == reads(0, skip=13)[:7]
    with pytest.raises(UsageError, match="3 sequences for 4 ranks"):
        next(data.block_order(3, 0, 4, 0))


ROUNDS, PROCESSES = 10, 8


def _native(folder: Path, rank: int, gather: Any) -> int:
    def run_on_rank0(work: Any, *_: Any) -> Any:
        prepared = work() if rank == 0 else None
        gather(None)
        return prepared or work()

    with patch.object(ranks, "run_on_rank0", run_on_rank0):
        return int(prepare(settings(data={"samples": 64}), folder).tokens.sum())


def _hf(folder: Path, rank: int, gather: Any) -> int:
    """Each process is a separate run that creates missing blocks."""
    from seatrial.train.hf import data as hf_data

    fields = {"samples": 64, "layout": "markov_chain", "cache": str(folder)}
    blocks = hf_data.prepare(settings(stack="hf", seq_len=9, data=fields), folder).blocks
    return sum(int(blocks[number]["input_ids"].sum()) for number in range(len(blocks)))


def _killed(prepare: Any, folder: Path) -> None:
    from seatrial.train.hf import data as hf_data

    def kill(*_: Any) -> None:  # the worst moment: all is written, nothing renamed
        os.kill(os.getpid(), 9)

    with patch.object(data, "write_json", kill), patch.object(hf_data, "write_json", kill):
        prepare(folder, 0, lambda value: [value])


def _process(prepare: Any, rank: int, folder: Path, barrier: Any, queue: Any) -> None:
    def gather(value: Any) -> list[Any]:
        barrier.wait(60)
        return [value]

    for number in range(ROUNDS):
        barrier.wait(60)
        queue.put((number, prepare(folder / str(number), rank, gather)))
        barrier.wait(60)


@pytest.mark.training
@pytest.mark.parametrize("prepare", [_native, _hf])
def test_a_cache_is_shared_by_all_processes_and_survives_kills(tmp_path: Path, prepare: Any) -> None:
    """Eight processes prepare data in ten folders. In each folder, an earlier process was killed before the rename.

    With stack native the eight processes are ranks of one run, with stack hf they are separate runs.
    """
    expected = int(markov.generate_sequences(64, 9, 0).sum())
    queue, barrier = FORK.Queue(), FORK.Barrier(PROCESSES)
    processes = [
        FORK.Process(target=_process, args=(prepare, rank, tmp_path, barrier, queue), daemon=True)
        for rank in range(PROCESSES)
    ]
    folders = [tmp_path / str(number) for number in range(ROUNDS)]
    killed_processes = [FORK.Process(target=_killed, args=(prepare, folder), daemon=True) for folder in folders]
    for process in killed_processes:
        process.start()
    for process, folder in zip(killed_processes, folders, strict=True):
        process.join(60)
        assert process.exitcode == -9
        (leftover,) = folder.iterdir()
        assert ".incomplete-" in leftover.name
    for process in processes:
        process.start()
    results = [queue.get(timeout=60) for _ in range(ROUNDS * PROCESSES)]
    for process in processes:
        process.join(30)
    assert sorted(results) == [(number, expected) for number in range(ROUNDS) for _ in range(PROCESSES)]
    assert all(len([entry for entry in path.iterdir() if ".incomplete-" not in entry.name]) == 1 for path in folders)
