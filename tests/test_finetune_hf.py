"""The Hugging Face example: a few steps on a few utterances of real speech, saved and reloaded."""

import json
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

for package in ("accelerate", "jiwer", "soundfile", "torchaudio", "transformers"):
    pytest.importorskip(package)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import finetune_hf  # noqa: E402
import transformers  # noqa: E402

import ldsa_nn  # noqa: E402


@pytest.fixture(autouse=True)
def threads():
    """The example sets the number of threads of its process, which here is the tests'."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def few(data_dir, tmp_path):
    """A directory with a manifest of some short utterances of AN4."""
    rows = {"train": [], "test": []}
    for line in (data_dir / "an4" / "manifest.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["split"] in rows and row["seconds"] < 2 and len(rows[row["split"]]) < 6:
            rows[row["split"]].append({**row, "archive": str(data_dir / "an4" / row["archive"])})
    folder = tmp_path / "few"
    folder.mkdir()
    lines = [json.dumps(row) for part in rows.values() for row in part]
    (folder / "manifest.jsonl").write_text("\n".join(lines))
    return folder


def run(few, out, *arguments):
    options = ["--data", str(few), "--out", str(out), "--steps", "3", "--batch", "2", "--cpu"]
    return finetune_hf.main([*options, *arguments])


def test_a_run_leaves_a_model_that_loads(few, tmp_path, capsys):
    results = run(few, tmp_path / "out", "--layers", "0", "-1", "--left", "4", "--right", "0")
    printed = capsys.readouterr().out
    names = [f"wav2vec2_bert.encoder.layers.{i}.self_attn" for i in (0, 3)]
    assert results["replaced"] == names
    assert f"attention replaced in {', '.join(names)}" in printed
    assert "note: transformers: from_pretrained" in printed
    assert "test, text and transcript:" in printed
    assert results["held_out"]["test"]["utterances"] == 6
    assert results["steps"] == 3
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCTC.from_config(config)
    options = dict(layers=[0, -1], left=4, right=0, use_bias=True)
    ldsa_nn.load_replaced(model, tmp_path / "out", **options)
    assert config.vocab_size == len(results["vocabulary"]) + 1
    assert sum(p.numel() for p in model.parameters()) == results["parameters"]


def test_a_pretrained_model_is_fine_tuned(few, tmp_path):
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        conv_dim=(8, 8), conv_kernel=(10, 10), conv_stride=(20, 16), num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, vocab_size=5, layerdrop=0.0,
        mask_time_length=2,
    )  # fmt: skip
    original = transformers.Wav2Vec2ForCTC(config)
    original.save_pretrained(tmp_path / "pretrained")
    transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(
        tmp_path / "pretrained"
    )
    results = run(few, tmp_path / "out", "--model", str(tmp_path / "pretrained"), "--layers", "1")
    assert results["replaced"] == ["wav2vec2.encoder.layers.1.attention"]
    state = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    # What is frozen is the pretrained; what is not has moved.
    frozen = "wav2vec2.feature_extractor.conv_layers.0.conv.weight"
    assert torch.equal(state[frozen], original.state_dict()[frozen])
    moved = "wav2vec2.encoder.layers.0.attention.v_proj.weight"
    assert not torch.equal(state[moved], original.state_dict()[moved])


def test_minutes_end_the_training(few, tmp_path):
    assert run(few, tmp_path / "out", "--minutes", "1e-9")["steps"] == 1


def test_bad_input_is_an_error_without_traceback(few, tmp_path):
    with pytest.raises(SystemExit, match=r"no .*manifest\.jsonl: --data takes a directory"):
        run(tmp_path, tmp_path / "out")
    with pytest.raises(SystemExit, match="layers: 9 is out of range, the model has 4 attentions"):
        run(few, tmp_path / "out", "--layers", "9")
    with pytest.raises(SystemExit, match=r"--model \S*nothing cannot be opened"):
        run(few, tmp_path / "out", "--model", str(tmp_path / "nothing"))


def test_the_sizes_can_be_built():
    for name in finetune_hf.CONFIGS:
        args = finetune_hf.parse(["--config", name])
        with torch.device("meta"):
            model, _ = finetune_hf.open_model(args, "AB")
        assert len(ldsa_nn.replace_attention(model, left=1, right=1).replaced) >= 4
