"""The model card of a recogniser that train_ctc.py has trained."""

from typing import Any

import torch


def model_card(results: dict[str, Any]) -> str:
    """README.md of a model hub: what the model is, how to use it, what it was trained on.

    results: what results.json holds.
    """
    options, held_out = results["options"], results["held_out"]
    rows = []
    for split, score in held_out.items():
        of_split = f"{split} ({score['utterances']} utterances, {score['speakers']} speakers)"
        rows.append(f"| {of_split} | greedy | {score['wer']} | {score['cer']} |")
        if "beam" in score:
            search, beam = f"prefix search, {options['beam']} beams", score["beam"]
            rows.append(f"| {of_split} | {search} | {beam['wer']} | {beam['cer']} |")
    if results["delay_ms"] is None:
        use = "It reads whole utterances: `load_recogniser`, then `transcribe`, of recogniser.py."
    else:
        use = (
            f"It streams, with {results['delay_ms']} ms of look-ahead:\n\n"
            "```\npython examples/stream.py --checkpoint checkpoint.pt FILE\n```"
        )
    limits = "It knows the words and the recording conditions of its training data alone."
    if results["source"] == "synthetic":
        limits = "It was trained on synthetic speech and is no recogniser for recordings."
    shape = f"{options['layers']} layers of width {options['dim']}, {options['heads']} heads"
    recipe = "\n".join(f"| {name} | {value} |" for name, value in options.items())
    return f"""---
library_name: pytorch
pipeline_tag: automatic-speech-recognition
tags: [speech-recognition, ctc, conformer, ldsa_nn]
---

# CTC Conformer, {results["attention"]} attention, trained on {results["source"]}

{results["parameters"]:,} parameters: {shape}, of the {results["encoder"]} encoder of
`examples/train_ctc.py` in ldsa_nn. Input: audio of one channel at 16 kHz. Output: text.

{use}

## Results

Of speakers that training did not hear; no language model, no lexicon.

| split | search | WER % | CER % |
|---|---|---|---|
{chr(10).join(rows)}

## Training

{results["steps"]} steps in {results["minutes"]} minutes. Speed perturbation, SpecAugment and random
levels; AdamW, a linear warm-up and a cosine decay; and

| option | value |
|---|---|
| device | {results["device"]} |
| processes | {results["processes"]} |
| torch | {torch.__version__} |
{recipe}

## Limits

{limits}
What licence it can have, the terms of its training data say: add one before you publish it.
"""
