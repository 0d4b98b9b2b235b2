"""Fine-tune a Hugging Face speech encoder with CTC, its attention replaced by local windows.

    python examples/finetune_hf.py                         # tiny, from scratch, synthetic digits
    python examples/finetune_hf.py --data DIR              # a directory with a manifest.jsonl
    python examples/finetune_hf.py --data DIR --model DIR  # a pretrained model that lies in DIR
    python examples/finetune_hf.py --layers 0 1 2          # the other layers keep their attention

The model is anything that AutoModelForCTC opens and `ldsa-replace --list` calls replaceable; its
pretrained weights come first and the attention is replaced then. transformers' Trainer trains it to
write letters. The output directory gets what save_pretrained writes, results.json, and is loaded
again with `ldsa_nn.load_replaced`, to the same logits.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import SAMPLE_RATE, Corpus, Utterance, read_manifest, read_synthetic
from recogniser import greedy_text
from torch import nn
from train_ctc import number

import ldsa_nn

try:
    import jiwer
    import transformers
    from tqdm import tqdm
    from transformers import AutoModelForCTC, Trainer, TrainerCallback, TrainingArguments
except ImportError as error:
    raise ImportError(f"{error}: run pip install 'ldsa_nn[examples]'") from error

# Wav2Vec2-BERT: log-mel input, and a convolution that is causal and keeps padding apart. STACK
# frames of 10 ms make one of the model's: fewer are learnt from scratch more easily.
STACK = 4
CONFIGS = {
    "tiny": dict(
        hidden_size=144,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=384,
        conv_depthwise_kernel_size=15,
        position_embeddings_type=None,
        layerdrop=0.0,
        mask_time_length=5,
        initializer_range=0.08,  # the default is for models many times as wide
    ),
    "base": dict(
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        conv_depthwise_kernel_size=31,
        layerdrop=0.0,
    ),
}
LEARNING_RATES = {"tiny": 2e-3, "base": 3e-4, None: 1e-4}


def open_model(
    args: argparse.Namespace, vocabulary: str
) -> tuple[nn.Module, transformers.FeatureExtractionMixin]:
    """The original model with a new head for the vocabulary, and what makes its features."""
    head = dict(
        vocab_size=1 + len(vocabulary),
        pad_token_id=0,  # CTC's blank
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,  # speech of more symbols than frames has no alignment
    )
    if args.model is None:
        extractor = transformers.SeamlessM4TFeatureExtractor(stride=STACK)
        width = STACK * extractor.num_mel_bins
        config = transformers.Wav2Vec2BertConfig(
            feature_projection_input_dim=width, **CONFIGS[args.config], **head
        )
        return AutoModelForCTC.from_config(config), extractor
    model = AutoModelForCTC.from_pretrained(args.model, ignore_mismatched_sizes=True, **head)
    if hasattr(model, "freeze_feature_encoder"):
        model.freeze_feature_encoder()
    return model, transformers.AutoFeatureExtractor.from_pretrained(args.model)


class Examples(torch.utils.data.Dataset):
    """A split as the model takes it: features made once, and letters as numbers from 1."""

    def __init__(
        self,
        utterances: list[Utterance],
        extractor: transformers.FeatureExtractionMixin,
        vocabulary: str,
        label: str,
    ) -> None:
        """label: of the progress bar."""
        name = extractor.model_input_names[0]
        self.items = []
        for utterance in tqdm(utterances, label, unit="utt"):
            audio = utterance.audio.numpy().astype(np.float32) / 32768
            features = extractor(audio, sampling_rate=SAMPLE_RATE, return_tensors="np")[name][0]
            # Letters that training never wrote are not in the vocabulary.
            letters = [vocabulary.index(c) + 1 for c in utterance.text if c in vocabulary]
            self.items.append({name: features, "labels": letters})

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


class Collate:
    """Pad a batch: the mask tells real frames, -100 what is no label."""

    def __init__(self, extractor: transformers.FeatureExtractionMixin) -> None:
        """extractor: pads the features as the model expects."""
        self.extractor = extractor
        self.name = extractor.model_input_names[0]

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.extractor.pad(
            {self.name: [item[self.name] for item in items]},
            padding=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        labels = [torch.tensor(item["labels"], dtype=torch.int64) for item in items]
        padded = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        return {**batch, "labels": padded}


class Deadline(TrainerCallback):
    """Ends the training after some minutes."""

    def __init__(self, minutes: float) -> None:
        """minutes: from the first batch on."""
        self.minutes = minutes

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end = time.monotonic() + 60 * self.minutes

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if time.monotonic() >= self.end:
            control.should_training_stop = True


@torch.inference_mode()
def transcribe(
    model: nn.Module, examples: Examples, collate: Collate, vocabulary: str, label: str
) -> list[str]:
    """Greedy transcripts, one utterance at a time: of a batch, some hosts let padding leak."""
    model.eval()
    device = next(model.parameters()).device
    texts = []
    for item in tqdm(examples, label, unit="utt"):
        batch = collate([item])
        del batch["labels"]
        logits = model(**{name: value.to(device) for name, value in batch.items()}).logits
        texts.append(greedy_text(logits[0].argmax(-1).tolist(), vocabulary))
    return texts


def check_reload(
    args: argparse.Namespace, model: nn.Module, batch: dict[str, torch.Tensor], options: dict
) -> None:
    """Load what was saved into the original architecture, and compare the logits."""
    again = AutoModelForCTC.from_config(transformers.AutoConfig.from_pretrained(args.out))
    # Not from_pretrained: that knows the original attention alone and would leave it random.
    ldsa_nn.load_replaced(again, args.out, **options)
    model = model.cpu().eval()
    with torch.inference_mode():
        if not torch.equal(model(**batch).logits, again.eval()(**batch).logits):
            raise RuntimeError(f"the model loaded from {args.out} gives other logits")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    count = number(int, "a whole number of at least 1", lambda n: n >= 1)
    from_0 = number(int, "a whole number of at least 0", lambda n: n >= 0)
    positive = number(float, "a finite number above 0", lambda x: 0 < x < math.inf)
    add("--data", metavar="DIR", help="directory with a manifest.jsonl; else synthetic digits")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--model", metavar="DIR", help="pretrained model to start from, or its name in the hub"
    )
    source.add_argument(
        "--config", choices=list(CONFIGS), default="tiny", help="Wav2Vec2-BERT from scratch"
    )
    add("--out", type=Path, default=Path("runs/finetune-hf"), help=" ")
    add("--layers", type=int, nargs="+", help="which to replace, from 0; not given: all")
    add(
        "--left",
        type=from_0,
        default=10,
        help="frames before the current one (40 ms; with --model mostly 20 ms)",
    )
    add("--right", type=from_0, default=10, help="frames after it")
    add("--steps", type=count, default=3000, help="batches to train on")
    add("--minutes", type=positive, help="end after these, if that is before --steps are done")
    add("--batch", type=count, default=8, help="utterances in a batch")
    add("--lr", type=positive, help="peak; not given: 2e-3 (tiny), 3e-4 (base) or 1e-4 (--model)")
    add("--seed", type=from_0, default=0, help=" ")
    add("--cpu", action="store_true", help="even where there is a GPU")
    # Threads that wait for one another gain a model this small nothing.
    add("--threads", type=count, default=1, help="CPU threads; more pays for wider models")
    add("--bf16", action="store_true", help="bfloat16 autocast")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Fine-tune, report, and return what results.json holds."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    transformers.set_seed(args.seed)
    try:
        if args.model is not None:  # before the data, which takes longer
            transformers.AutoConfig.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--model {args.model} cannot be opened: {error}") from error
    try:
        corpus: Corpus = read_manifest(args.data) if args.data else read_synthetic(seed=args.seed)
        vocabulary = "".join(sorted({c for u in corpus["train"] for c in u.text}))
        model, extractor = open_model(args, vocabulary)
        options = dict(left=args.left, right=args.right, layers=args.layers)
        report = ldsa_nn.replace_attention(model, init_from_old=True, use_bias=True, **options)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"{error}") from error
    for warning in report.warnings:
        print(f"note: {warning}")
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{type(model).__name__}: {parameters:,} parameters; attention replaced in "
        f"{', '.join(report.replaced)}"
    )

    collate = Collate(extractor)
    splits = {
        split: Examples(utterances, extractor, vocabulary, f"features of {split}")
        for split, utterances in corpus.items()
    }
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.out),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=args.lr or LEARNING_RATES[None if args.model else args.config],
            lr_scheduler_type="cosine",
            warmup_steps=args.steps // 10,
            weight_decay=0.01,
            train_sampling_strategy="group_by_length",
            logging_steps=max(1, args.steps // 20),
            save_strategy="no",
            report_to="none",
            seed=args.seed,
            use_cpu=args.cpu,
            bf16=args.bf16,
            disable_tqdm=False,
        ),
        data_collator=collate,
        train_dataset=splits["train"],
        processing_class=extractor,
        callbacks=[Deadline(args.minutes)] if args.minutes else None,
    )
    seconds = trainer.train().metrics["train_runtime"]

    trainer.save_model()
    scores = {}
    for split in sorted(splits.keys() - {"train"}):
        heard = transcribe(model, splits[split], collate, vocabulary, f"transcribe {split}")
        said = [utterance.text for utterance in corpus[split]]
        print(f"\n{split}, text and transcript:")
        for i in range(0, len(said), -(-len(said) // 4)):
            print(f"  {said[i]}\n  {heard[i]}\n")
        scores[split] = {
            "utterances": len(said),
            "wer": round(100 * jiwer.wer(said, heard), 2),
            "cer": round(100 * jiwer.cer(said, heard), 2),
        }
    check_reload(args, model, collate(splits["train"].items[:2]), dict(options, use_bias=True))
    results = {
        "data": args.data or "synthetic",
        "model": args.model or args.config,
        "replaced": report.replaced,
        "window": [args.left, args.right],
        "vocabulary": vocabulary,
        "parameters": parameters,
        "steps": trainer.state.global_step,
        "minutes": round(seconds / 60, 2),
        "held_out": scores,
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    print("held out  utterances  WER %  CER %")
    for split, score in scores.items():
        print(f"{split:8}  {score['utterances']:10}  {score['wer']:5.1f}  {score['cer']:5.1f}")
    print(f"In {args.out}: the model, which load_replaced reads back to the same logits")
    return results


if __name__ == "__main__":
    main()
