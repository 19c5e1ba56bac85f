"""Data: the same sequences whatever the layout, next-token labels, and clear refusals."""

import numpy as np
import pytest
import torch

from runtime.training.data import SyntheticStream, micro_batches, open_data, share_of

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_text("the quick brown fox\n")
    (tmp_path / "a.md").write_text("jumps over the lazy dog\n")
    (tmp_path / "skip.png").write_bytes(b"\x89PNG")
    return tmp_path


def test_text_is_read_as_bytes_in_name_order_with_separators(folder):
    stream = open_data([folder], vocab_size=256, seq_len=8)
    whole = np.concatenate(stream.parts).tobytes()
    assert whole == b"jumps over the lazy dog\n\x00the quick brown fox\n\x00"
    assert stream.num_tokens == len(whole)


def test_windows_run_across_files_and_reach_both_ends(folder):
    stream = open_data([folder], vocab_size=256, seq_len=8)
    whole = np.concatenate(stream.parts).tobytes()
    found = {stream.window(np.random.default_rng(i), 20).tobytes() for i in range(500)}
    assert found == {whole[i : i + 20] for i in range(len(whole) - 19)}


def test_labels_are_the_next_tokens(folder):
    stream = open_data([folder], vocab_size=256, seq_len=8)
    batch = micro_batches(
        stream, seed=1, step=0, sequences=range(4), micro_batch_size=2, seq_len=8, device=CPU
    )
    assert [b["input_ids"].shape for b in batch] == [(2, 8), (2, 8)]
    for b in batch:
        assert torch.equal(b["input_ids"][:, 1:], b["labels"][:, :-1])


@pytest.mark.parametrize("data_parallel", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_every_layout_reads_the_same_global_batch(folder, data_parallel, micro_batch_size):
    stream = open_data([folder], vocab_size=256, seq_len=8)

    def rows(ranks, size):
        return torch.cat(
            [
                b["input_ids"]
                for rank in range(ranks)
                for b in micro_batches(
                    stream,
                    seed=3,
                    step=7,
                    sequences=share_of(8, ranks, rank),
                    micro_batch_size=size,
                    seq_len=8,
                    device=CPU,
                )
            ]
        )

    assert torch.equal(rows(data_parallel, micro_batch_size), rows(1, 8))


def test_steps_and_seeds_draw_other_sequences(folder):
    stream = open_data([folder], vocab_size=256, seq_len=8)

    def first(seed, step):
        return micro_batches(
            stream,
            seed=seed,
            step=step,
            sequences=range(4),
            micro_batch_size=4,
            seq_len=8,
            device=CPU,
        )[0]["input_ids"]

    assert not torch.equal(first(0, 0), first(0, 1))
    assert not torch.equal(first(0, 0), first(1, 0))
    assert torch.equal(first(5, 9), first(5, 9))


def test_without_data_the_standard_library_is_the_text():
    stream = open_data([], vocab_size=256, seq_len=1024)
    assert stream.num_tokens > 2_000_000
    window = stream.window(np.random.default_rng(0), 4096).astype(np.uint8).tobytes()
    assert b"\n    " in window  # source code


@pytest.mark.parametrize(("vocab_size", "kind"), [(50_000, np.uint16), (100_000, np.uint32)])
def test_token_files_are_read_in_the_width_of_the_vocabulary(tmp_path, vocab_size, kind):
    ids = np.arange(1000, dtype=kind) * (vocab_size // 1000)
    ids.tofile(tmp_path / "tokens.bin")
    np.save(tmp_path / "more.npy", ids)
    stream = open_data([tmp_path], vocab_size=vocab_size, seq_len=16)
    assert stream.num_tokens == 2000
    assert np.array_equal(stream.parts[1], ids)


def test_a_tokenizers_file_makes_the_ids(tmp_path, folder):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"the": 0, "fox": 1, "[UNK]": 2}, unk_token="[UNK]")  # noqa: S106
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    stream = open_data(
        [folder / "b.txt"], vocab_size=3, seq_len=2, tokenizer=tmp_path / "tokenizer.json"
    )
    assert stream.parts[0].tolist() == [0, 2, 2, 1]


def test_synthetic_tokens_cover_the_vocabulary():
    window = SyntheticStream(vocab_size=7).window(np.random.default_rng(0), 1000)
    assert set(window.tolist()) == set(range(7))


def refused(message, *paths, vocab_size=256, seq_len=8, tokenizer=None):
    with pytest.raises(ValueError, match=message):
        open_data(list(paths), vocab_size=vocab_size, seq_len=seq_len, tokenizer=tokenizer)


def test_bad_data_is_refused_with_the_path_and_the_numbers(tmp_path, folder):
    refused("no such file or folder: .*nowhere", tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused("no text or token files in .*empty", empty)
    refused(r"holds 21 tokens; one sequence needs 101", folder / "b.txt", seq_len=100)
    refused(
        r"has token 120, the model's vocabulary has 100 \(0 to 99\)",
        folder / "b.txt",
        vocab_size=100,
    )
    np.array([1, 2, 3], dtype=np.uint16).tofile(tmp_path / "t.bin")
    refused("mixes token files", tmp_path / "t.bin", folder / "b.txt")
    np.save(tmp_path / "real.npy", np.ones(50))
    refused(r"real.npy holds float64 of shape \(50,\)", tmp_path / "real.npy")
    (tmp_path / "broken.npy").write_bytes(b"no array")
    refused("broken.npy is not a token file", tmp_path / "broken.npy")


def test_arrays_with_pickled_objects_are_refused(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    refused("objects.npy is not a token file", tmp_path / "objects.npy")


def test_a_broken_tokenizer_is_refused(tmp_path, folder):
    pytest.importorskip("tokenizers")
    (tmp_path / "bad.json").write_text("{}")
    refused("bad.json is not a tokenizers file", folder / "b.txt", tokenizer=tmp_path / "bad.json")
