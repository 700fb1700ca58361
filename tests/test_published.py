"""Published runs: rows are read, models rebuilt, and errors counted as the table says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from benchmarks.published.__main__ import main
from benchmarks.published.counting import Unknown
from benchmarks.published.practice import practice_of
from benchmarks.published.predict import device_name, layout_of, predict
from benchmarks.published.rows import Row, read_rows
from benchmarks.published.score import compare, model_flops, rank_correlation

HEAD = (
    "id,set,model,family,params_b,layers,hidden,heads,seq,vocab,gpu,gpus,gpus_per_node,interconnect,framework,tp,pp,dp,"
    "zero_stage,schedule,micro_batch,global_batch,act_ckpt,precision,step_time_s,mem_gb,mem_kind,oom,notes"
)
GPT = "gpt,gpt-dense,0.1,4,512,8,256,8192,A100-SXM4-80GB,8,8,NVLink,Megatron-DeepSpeed"
LINES = (
    f"a-1,a,{GPT},1,1,8,0,none,4,64,full,fp16,0.05,3,nvidia-smi,,",
    f"a-2,a,{GPT},2,1,4,0,none,4,64,none,fp16,0.06,,,,",
    f"a-3,a,{GPT},1,4,2,0,1f1b,4,64,full,fp16,0.08,,,,",
    f"a-4,a,{GPT},1,1,8,0,none,64,512,none,fp16,,,,OOM,",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "runs.csv"
    file.write_text("\n".join((HEAD, *LINES)) + "\n", encoding="utf-8")
    return file


def test_a_row_is_read_with_its_units(path: Path) -> None:
    row = read_rows(path)[0]
    assert (row.params, row.memory, row.zero, row.micro_batch, row.failed) == (1e8, 3e9, 0, 4.0, False)


def test_the_layout_is_the_rows_own(path: Path) -> None:
    found = [str(layout_of(row, practice_of(row))) for row in read_rows(path)[:3]]
    assert found == ["dp=8", "dp=4,tp=2", "dp=2,pp=4,schedule=1f1b"]


def test_more_devices_are_predicted_to_be_faster(path: Path) -> None:
    row = read_rows(path)[0]
    fewer = dataclasses.replace(row, gpus=4, dp=4)
    assert predict(row).seconds < predict(fewer).seconds


def test_recompute_takes_longer_and_less_memory(path: Path) -> None:
    row = dataclasses.replace(read_rows(path)[0], micro_batch=8.0)
    again, kept = predict(row), predict(dataclasses.replace(row, act_ckpt="none"))
    assert again.seconds > kept.seconds and again.num_bytes < kept.num_bytes


def test_a_failed_run_and_an_unknown_device_are_left_out_with_a_reason(path: Path) -> None:
    with pytest.raises(Unknown, match="the run failed"):
        compare(read_rows(path)[3])
    with pytest.raises(Unknown, match="no device 'abacus' is known"):
        device_name("abacus")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100-96gb-hbm2e(500w)", "H100-SXM-96GB"),
        ("a100-sxm4-40gb", "A100-SXM-40GB"),
        ("v100-16gb-sxm2", "V100-SXM2-16GB"),
        ("geforce rtx 2080 ti", "RTX-2080-Ti-11GB"),
        ("tesla p40-24gb", "P40-24GB"),
    ],
)
def test_devices_are_found_by_the_names_that_sources_use(text: str, name: str) -> None:
    assert device_name(text) == name


def test_ranks_are_those_of_spearman() -> None:
    assert rank_correlation([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1)
    assert rank_correlation([(1, 30), (2, 20), (3, 10)]) == pytest.approx(-1)
    assert rank_correlation([(1, 1), (2, 2)]) is None


def test_model_flops_are_six_for_each_parameter_and_token(path: Path) -> None:
    row: Row = dataclasses.replace(read_rows(path)[0], layers=0)
    assert model_flops(row, 10) == 60 * row.params


def test_the_table_is_printed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(path), "--rows"]) == 0
    text = capsys.readouterr().out
    assert "left out    1: a: the run failed" in text and "all" in text
