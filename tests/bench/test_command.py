"""``python -m bench kernels``, tiny, from end to end."""

from dataclasses import replace

import pytest
from click.testing import CliRunner

from bench import results, timing
from bench.__main__ import main
from bench.sets import OPS
from bench.timing import Probe

# torch warns about this machine when it is imported; these warnings are its own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*", "ignore:.*CUDA initialization.*")


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setitem(timing.PROBES, "cpu", Probe(1, 128, ("f32",)))
    monkeypatch.setitem(timing.CACHE_BYTES, "cpu", 1 << 10)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")


def bench(*arguments):
    command = ["kernels", "--device", "cpu", "--shapes", "tiny", "--seconds", "0", *arguments]
    return CliRunner().invoke(main, command, catch_exceptions=False)


def test_every_op_in_each_implementation(tmp_path):
    done = bench("--json", str(tmp_path / "run.jsonl"))
    assert done.exit_code == 0, done.output
    rows = results.read(tmp_path / "run.jsonl")
    assert {(row.op, row.implementation) for row in rows if not row.peer} == {
        (op, implementation) for op in OPS for implementation in ("xla", "reference")
    }
    assert ("select", "lax.top_k") in {(row.op, row.implementation) for row in rows if row.peer}
    for row in rows:
        assert row.error <= row.bound
        assert 0 < row.time["p10_us"] <= row.time["median_us"] <= row.time["p90_us"]
        assert row.share == pytest.approx(row.roofline["time_us"] / row.time["median_us"], rel=1e-4)
        assert row.op in done.output


def test_save_then_check(tmp_path):
    assert bench("--ops", "kv_write", "--save").exit_code == 0
    (path,) = (tmp_path / "results").glob("*.jsonl")
    rows = results.read(path)
    generous = [replace(row, roofline=row.roofline | {"time_us": row.roofline["time_us"] / 1000}) for row in rows]
    results.write(path, generous)
    done = bench("--ops", "kv_write", "--check")
    assert done.exit_code == 0, done.output


def test_check_fails_on_a_doctored_baseline(tmp_path):
    assert bench("--ops", "kv_write", "--save").exit_code == 0
    (path,) = (tmp_path / "results").glob("*.jsonl")
    rows = results.read(path)
    better = replace(rows[0], time=rows[0].time | {"p10_us": 1e-3})
    results.write(path, [better, *rows[1:]])
    done = bench("--ops", "kv_write", "--check", "--save")
    assert done.exit_code == 1
    assert f"{rows[0].label}: " in done.output.replace("\n", "") and "times slower" in done.output
    assert results.read(path)[0] == better  # a failed run is not kept


def test_check_without_a_baseline_says_so():
    done = bench("--ops", "kv_write", "--check")
    assert done.exit_code == 1
    assert "no baseline of" in done.output and "--save" in done.output


def test_check_of_other_ops_says_so():
    assert bench("--ops", "kv_write", "--save").exit_code == 0
    done = bench("--ops", "select", "--check")
    assert done.exit_code == 1
    assert "no row of these ops" in done.output


def test_a_wrong_result_fails_and_is_not_timed(monkeypatch, tmp_path):
    import jax_mla

    right = jax_mla.kv_write

    def wrong(*arguments, implementation, **static):
        pool = right(*arguments, implementation=implementation, **static)
        return pool.at[1, 3].set(0) if implementation == "xla" else pool

    monkeypatch.setattr(jax_mla, "kv_write", wrong)
    done = bench("--ops", "kv_write", "--json", str(tmp_path / "run.jsonl"))
    assert done.exit_code == 1
    assert "kv_write (T 3 layout bf16), xla: inf half ulps" in done.output.replace("\n", "")
    assert {row.implementation for row in results.read(tmp_path / "run.jsonl") if not row.peer} == {"reference"}


def test_one_that_raises_fails_and_the_rest_goes_on(monkeypatch, tmp_path):
    import jax_mla

    right = jax_mla.select

    def broken(*arguments, implementation, **static):
        if implementation == "xla":
            raise NotImplementedError("not on this chip")
        return right(*arguments, implementation=implementation, **static)

    monkeypatch.setattr(jax_mla, "select", broken)
    done = bench("--ops", "select", "--json", str(tmp_path / "run.jsonl"))
    assert done.exit_code == 1
    assert "NotImplementedError: not on this chip" in done.output
    assert "reference" in {row.implementation for row in results.read(tmp_path / "run.jsonl")}


def test_a_missing_peer_is_named(monkeypatch):
    from bench.peers import base

    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: None)
    done = bench("--ops", "select,kv_write")
    assert done.exit_code == 0
    assert "not run: torch.topk: torch is not installed, for select" in done.output
    assert done.output.count("torch.index_put_, packed before: torch is not installed") == 1  # and not once a case


@pytest.mark.parametrize("fault", ["raises", "is wrong"])
def test_a_peer_at_fault_is_named_and_is_not_ours(monkeypatch, fault, tmp_path):
    import torch

    def broken(*_, **__):
        raise RuntimeError("no kernel image")

    def wrong(x, k, **_):
        return torch.return_types.topk((x[:, :k], torch.zeros(len(x), k, dtype=torch.int64)))

    monkeypatch.setattr(torch, "topk", broken if fault == "raises" else wrong)
    assert bench("--ops", "select", "--save", "--json", str(tmp_path / "run.jsonl")).exit_code == 0
    done = bench("--ops", "select", "--check")
    assert "peer failed: select (T 3 S 200 k 16), torch.topk: " in done.output
    assert ("RuntimeError: no kernel image" if fault == "raises" else "wrong, more than 0") in done.output
    measured = {row.implementation for row in results.read(tmp_path / "run.jsonl")}
    assert measured == {"xla", "reference", "lax.top_k"}


def test_rows_of_peers_say_what_they_were_measured_with(tmp_path):
    import jax
    import torch

    done = bench("--ops", "select,kv_write", "--json", str(tmp_path / "run.jsonl"))
    rows = {(row.op, row.implementation): row for row in results.read(tmp_path / "run.jsonl")}
    assert rows["select", "lax.top_k"].versions == {"jax": jax.__version__}
    assert rows["select", "torch.topk"].versions == {"torch": torch.__version__.partition("+")[0]}
    assert rows["select", "xla"].versions is None
    assert [row.implementation for row in rows.values() if row.part] == ["torch.copy_ of as many bytes"]
    assert "vs best peer" in done.output


def test_match_takes_some_cases(tmp_path):
    done = bench("--match", "kv_write.*fp8", "--save")
    assert done.exit_code == 0, done.output
    (path,) = (tmp_path / "results").glob("*.jsonl")
    assert {(row.op, row.shape["layout"]) for row in results.read(path)} == {
        ("kv_write", "fp8_656"),
        ("kv_write", "fp8_576"),
    }
    generous = [
        replace(row, roofline=row.roofline | {"time_us": row.roofline["time_us"] / 1000}) for row in results.read(path)
    ]
    results.write(path, generous)
    done = bench("--match", "kv_write.*fp8_656", "--check")  # of the other rows nothing is asked
    assert done.exit_code == 0, done.output
    assert bench("--match", "nothing like it").exit_code == 1


def test_pictures(tmp_path):
    done = bench("--ops", "kv_write,sparse_mla", "--plot", str(tmp_path / "run.png"), "--save")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    (path,) = (tmp_path / "results").glob("*.jsonl")
    done = CliRunner().invoke(main, ["plot", str(path), str(tmp_path / "again.svg")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "sparse_mla" in (tmp_path / "again.svg").read_text() or (tmp_path / "again.svg").stat().st_size > 10_000


def test_saving_draws_what_is_kept(tmp_path):
    assert bench("--ops", "kv_write", "--save").exit_code == 0
    (picture,) = (tmp_path / "results").glob("*.png")
    (path,) = (tmp_path / "results").glob("*.jsonl")
    assert picture.stem == path.stem


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seconds", "-1"), "-1.0 is not in the range 0<=x<=3600"),
        (("--plot", "x.foo"), "expected a name that ends in .png, .svg or .pdf, got 'x.foo'"),
        (["--ops", "slect"], "'slect' is none of"),
        (["--shapes", "x"], "'x'"),
        (["--match", "("], "no regular expression"),
    ],
)
def test_bad_arguments(arguments, message):
    done = bench(*arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_a_device_that_is_not_there():
    done = CliRunner().invoke(main, ["kernels", "--device", "gpu"])
    assert done.exit_code == 1
    assert "--device gpu: JAX finds none here" in done.output


def test_what_is_no_file_of_rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("# rows\n")
    done = CliRunner().invoke(main, ["plot", str(file), str(tmp_path / "x.png")])
    assert done.exit_code == 2 and "rows.jsonl holds no rows of this project's" in done.output
