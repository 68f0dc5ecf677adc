"""Writes docs/results.md from the JSON files under benchmarks/results/.

    python benchmarks/write_results.py

`tests/test_results.py` runs it and compares: the page cannot differ from the files.
"""

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from deciding_code import DECIDES, EXPLANATION, RESULTS, ROOT, mark

PAGE = ROOT / "docs" / "lab" / "results.md"
GIB = 2**30
METRICS = ("correlation", "rmse", "psnr", "ssim")
QUESTIONS = ("gpt2", "gpt2-lean", "gpt2-memory", "eit", "eit-reference", "slices")

INTRODUCTION = f"""\
# Measured results

Written by `benchmarks/write_results.py` from the JSON files in
[benchmarks/results](../../benchmarks/results); each section names the script that measures it. Both
sides of a comparison ran in turn, in one run, on one machine: two cores of a rented AMD EPYC unless
stated otherwise. Nothing here ran on a TPU or a GPU; what a TPU compiler reports is marked so.

{EXPLANATION} `python benchmarks/stale.py` lists these results and measures them again."""


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def stale(name: str) -> str:
    """The mark of a result that older code decided; files of rows are marked on their pages."""
    return mark(read(name), name) if name in DECIDES else ""


def section(title: str, script: str, names: Sequence[str], *parts: str) -> str:
    """A heading, its parts, and a line that says where the numbers come from."""
    files = ", ".join(
        f"[{name}.json](../../benchmarks/results/{name}.json){stale(name)}" for name in names
    )
    versions = read(names[0]).get("versions")
    named = ", ".join(f"{package} {version}" for package, version in (versions or {}).items())
    source = f"`benchmarks/{script}`, {files}" + (f"; {named}." if named else ".")
    return "\n\n".join([f"## {title}", *parts, source])


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def interval(values: Sequence[float], digits: int) -> str:
    mean, low, high = (f"{value:.{digits}f}" for value in values)
    return f"{mean} [{low}, {high}]"


def eit_quality() -> str:
    found = read("eit_quality")
    settings = found["settings"]

    def metrics(data: str) -> str:
        digits = {"correlation": 3, "rmse": 3, "psnr": 1, "ssim": 3}
        rows = [
            [name.replace("mean of K", f"mean of {settings['samples']}"),
             *(interval(values[m], digits[m]) for m in METRICS)]
            for name, values in found[data].items()
        ]  # fmt: skip
        return table(["", "correlation", "RMSE", "PSNR", "SSIM"], rows)

    return section(
        "EIT: image quality", "eit_quality.py", ["eit_quality"],
        f"Networks trained on {settings['n'] * 8 // 10:,} simulated samples and no measured one, "
        f"{found['training_minutes']:.0f} minutes each on one core (size `{settings['size']}`); "
        "means over the images with 95 % intervals. The simulation's ranges of contrast, size and "
        "noise were chosen after looking at the measured voltages of these sets. The linear "
        "reconstructions keep their own amplitude: compare their correlation alone.",
        "Measured frames of UEF2017:\n\n" + metrics("uef2017"),
        "Simulated test samples:\n\n" + metrics("simulated"),
        '<img src="eit_uef2017.png" width="400" '
        'alt="Truth, Tikhonov, ours (mean of 8, one sample) on measured frames of UEF2017">',
    )  # fmt: skip


def eit_speed() -> str:
    found = read("eit_speed_cpu")
    rows = [
        [name, *(f"{values[part]:.2f}" for part in ("step", "sampling"))]
        for name, values in found["lean_over_published"].items()
    ]
    return section(
        "EIT: lean form against published form on a CPU", "eit_speed.py", ["eit_speed_cpu"],
        f"The `{found['size']}` network, batch {found['rows']}, {found['threads']} threads on "
        f"{found['hardware']}: time of the lean form over time of the published form at the same "
        f"precision, the fastest of {found['rounds']} rounds. A training step is forward, "
        "backward, clipping, Adam and EMA; sampling takes 5 steps.",
        table(["precision", "training step", "sampling"], rows),
        table(
            ["form", "training step (s)", "sampling (s)"],
            [[name, f"{min(side['step_seconds']):.2f}", f"{min(side['sampling_seconds']):.2f}"]
             for name, side in found["sides"].items()],
        ),
    )  # fmt: skip


def eit_tpu() -> str:
    names = ["eit_tpu_v5e-1", "eit_tpu_v5e-8"]
    rows = [
        [a["form"] + stale(name), a["target"], a["rows"], a["effort"], f"{a['used_gib']:.2f}",
         f"{a['gbytes_a_sample']:.1f}",
         ", ".join(f"{count} {kind}" for kind, count in a["collectives"].items()) or "none"]
        for name in names for a in read(name)["answers"]
    ]  # fmt: skip
    return section(
        "EIT: the TPU compiler's report", "eit_tpu.py", names,
        "The full-width network, bf16, Adam, clipping and EMA included, compiled for TPU v5e "
        "(15.75 GiB a chip); nothing was executed. `recomputed` is the published form with "
        "activation checkpointing.",
        table(["form", "target", "batch per chip", "effort", "GiB", "GB moved per sample",
               "collectives"], rows),
    )  # fmt: skip


def engine_cost() -> str:
    names = ["engine_cost_cpu_tiny", "engine_cost_tpu_tiny"]
    devices = {"cpu": "CPU, eager", "tpu": "emulation on CPU (torch_xla, one virtual device)"}
    found = [read(name) for name in names]
    rows = [
        [devices[f["hardware"]["hardware"]] + stale(name), f"{f['ratio_median']:.2f}",
         f"{min(f['ratios']):.2f} to {max(f['ratios']):.2f}", f"{f['ratio_of_fastest']:.2f}"]
        for name, f in zip(names, found, strict=True)
    ]  # fmt: skip
    return section(
        "The engine's overhead", "engine_cost.py", names,
        f"Time of a training step through the engine over a bare loop's, blocks of both in turn "
        f"(EIT `{found[0]['size']}`, batch {found[0]['batch']}, {found[0]['samples']:,} samples). "
        f"One thread loads {found[0]['loading_samples_per_second_one_process']:,.0f} samples "
        "a second.",
        table(["hardware", "median ratio", "range of the blocks", "fastest against fastest"], rows),
    )  # fmt: skip


def compiler_trials() -> str:
    names = [f"probe_compiler_{question}" for question in QUESTIONS]
    rows = []
    for name in names:
        for found in read(name)["answers"].values():
            answer = found["answer"]
            for trial in answer["trials"]:
                if trial["effort"] == "full":
                    rows.append([
                        " ".join(without_data(found["arguments"])) + stale(name), answer["devices"],
                        trial["batch"], "fits" if trial["fits"] else "does not fit",
                        f"{trial['used_bytes'] / GIB:.2f}",
                    ])  # fmt: skip
    gpt2 = read(names[0])["answers"]["v5e-1"]
    versions = gpt2["answer"]["versions"]
    return section(
        "probe-batch: the TPU compiler's report",
        "probe_compiler.py",
        names,
        "Trials compiled at full effort with no TPU ("
        + ", ".join(f"{package} {version}" for package, version in versions.items())
        + ")."
        + (
            f" The first search took {gpt2['answer']['compiles']} compilations and "
            f"{gpt2['seconds']:.0f} s on two cores."
            if "seconds" in gpt2
            else ""
        ),
        table(["tpukit probe-batch", "chips", "batch per chip", "", "GiB"], rows),
    )


def without_data(arguments: Sequence[str]) -> list[str]:
    """A probe's arguments without its data path, which probing a target does not read."""
    if "--data-path" not in arguments:
        return list(arguments)
    at = arguments.index("--data-path")
    return [*arguments[:at], *arguments[at + 2 :]]


PROBE_PEERS = [f"probe_peers_{task}{xla}" for task in ("eit", "llm") for xla in ("", "_xla")]


def probe_peers() -> str:
    names = [name for name in PROBE_PEERS if (RESULTS / f"{name}.json").exists()]
    rows = [
        [f"{found['task']}, {found['limit']}, {found['hardware']}{stale(name)}", finder,
         answer["largest"], answer["trials"], f"{answer['seconds']:.0f}", yes(answer["runs"]),
         yes(answer["runs_a_tenth_above"])]
        for name in names for found in [read(name)] for finder, answer in found["answers"].items()
    ]  # fmt: skip
    return section(
        "probe-batch: other batch finders", "probe_peers.py", names,
        "The largest batch under a memory limit on a CPU, by tpukit, Lightning and accelerate, "
        "each answer checked by training with it and with a tenth more. tpukit's trials run in "
        "processes of their own.",
        table(["task, limit and hardware", "finder", "largest batch", "trials", "seconds", "trains",
               "a tenth more trains"], rows),
    )  # fmt: skip


def image_loading() -> str:
    found = read("image_loading")
    settings = found["settings"]
    rates = found["images_per_second_per_core"]
    return section(
        "Images: loading", "image_loading.py", ["image_loading"],
        f"JPEG files of {settings['size'][0]} x {settings['size'][1]} pixels, cropped to "
        f"{settings['side']} x {settings['side']}, flipped, colours jittered, by "
        f"{settings['workers']} DataLoader workers; medians of {settings['rounds']} rounds. timm's "
        "and torchvision's loaders also normalise to float32 on the host, which tpukit leaves to "
        "the device.",
        table(["loader", "images/s a core", "tpukit's rate to it"],
              [[name, f"{rate:.0f}", f"{rates['tpukit'] / rate:.2f}"]
               for name, rate in rates.items()]),
    )  # fmt: skip


def image_accuracy() -> str:
    found = read("image_accuracy")
    settings = found["settings"]
    rows = [
        [name, f"{100 * accuracy['mean']:.2f} %", f"{100 * accuracy['deviation']:.2f} %",
         f"{statistics.mean(run['seconds'] for run in found['runs'][name]):.0f}"]
        for name, accuracy in found["accuracy"].items()
    ]  # fmt: skip
    return section(
        "Images: accuracy", "image_accuracy.py", ["image_accuracy"],
        f"`{settings['model']}` on {settings['images']:,} generated shapes of {settings['side']} x "
        f"{settings['side']} pixels, {settings['epochs']} epochs with AdamW at rate "
        f"{settings['lr']:g}, {settings['seeds']} seeds; validation accuracy after the last epoch "
        f"beside timm's training script (revision {found['timm_revision'][:12]}).",
        table(["", "mean", "standard deviation", "seconds"], rows),
    )  # fmt: skip


def tpu_batches() -> str:
    found = read("tpu_batches")
    answered = [key for key, row in found.items() if "error" not in row]
    return "\n\n".join([
        "## Batches that fit a TPU",
        f"The TPU compiler's answer for {len(answered)} models: [tpu_batches.md](tpu_batches.md).",
        "`benchmarks/tpu_batches.py`, "
        "[tpu_batches.json](../../benchmarks/results/tpu_batches.json).",
    ])  # fmt: skip


def activation_memory() -> str:
    found = read("activation_memory")
    rows = [
        [f"`{name}`", *(f"{row[n] / 1e6:.1f}" for n in ("saved", "saved_in_tiles", "compiled")),
         f"{row['compiled'] / row['saved']:.2f}", f"{row['compiled'] / row['saved_in_tiles']:.2f}"]
        for name, row in found["models"].items()
    ]  # fmt: skip
    return section(
        "Activations: the compiler beside autograd", "activation_memory.py", ["activation_memory"],
        "Megabytes a sample of a training step under bf16: what plain PyTorch saves for the "
        "backward pass, the same in the TPU's tiles of 8 x 128, and the temporaries of the step "
        f"that is compiled for a {found['target']}; slopes between two small batches.",
        table(["", "saved", "saved, in tiles", "compiled", "compiled / saved",
               "compiled / in tiles"], rows),
    )  # fmt: skip


def step_traffic() -> str:
    steps = read("step_traffic")["steps"]
    rows = [
        [" ".join([step["task"], *step["set"]]), step["target"], step["rows"], step["commit"],
         f"{step['gib']:.2f}", f"{step['gbytes']:.0f}", f"{step['memory_seconds']:.3f}",
         f"{step['arithmetic_seconds']:.3f}"]
        for step in sorted(steps, key=lambda step: (step["task"], step["target"], -step["gbytes"]))
    ]  # fmt: skip
    return section(
        "Bytes of a training step", "step_traffic.py", ["step_traffic"],
        "Steps compiled at the fast setting, and what they take at least on the chip: bytes moved "
        "at its memory's bandwidth, operations at its peak. The first line of each is the step "
        "before products and layer norms were written for the attention kernel's layout "
        "([performance.md](performance.md)).",
        table(["step", "target", "batch", "commit", "GiB", "GB moved", "memory (s)",
               "arithmetic (s)"], rows),
    )  # fmt: skip


def first_step() -> str:
    found = read("first_step")
    rows = [
        [case, *(f"{times[when]['seconds']:.1f} ({times[when]['step_seconds']:.1f})"
                 for when in ("first", "again", "bare script")),
         f"{times['again']['seconds'] / times['bare script']['seconds']:.2f}"]
        for case, times in found["first_step"].items()
    ]  # fmt: skip
    return section(
        "From the command to the first step", "first_step.py", ["first_step"],
        f"Seconds, and in brackets those of the step itself, XLA's compilation included; medians "
        f"of {found['rounds']}, `--preset quick`. The bare script makes the same model and one "
        "batch in memory: it reads no data, writes no log and checks nothing. On the virtual "
        "device both compute in bf16.",
        table(["", "first time on a machine", "again", "bare script", "again / bare"], rows),
    )  # fmt: skip


def yes(value: bool) -> str:
    return "yes" if value else "no"


SUMMARIZE_MODELS = {"": "GPT-2 124M", "_qwen3": "A model of Qwen3's shape with 100 M parameters"}


def summarize_generation() -> str:
    names = [f"summarize_generation{suffix}" for suffix in SUMMARIZE_MODELS]
    parts = []
    for name, model in zip(names, SUMMARIZE_MODELS.values(), strict=True):
        for search, measured in read(name)["searches"].items():
            rows = [
                [side, " ".join(map(str, flat(measured[side]["best"]))),
                 *(f"{statistics.median(r[rate] for r in measured[side]['rounds']):.1f}"
                   for rate in ("tokens_per_second", "tokens_per_cpu_second"))]
                for side in ("tpukit", "transformers")
            ]  # fmt: skip
            parts += [
                f"{model}, {search}, {measured['rows']} prompts, "
                f"{measured['mean_answer_length']:.0f} new tokens on average: "
                f"**{measured['ratio_of_wall_time']:.2f} times the tokens a second**, the same "
                f"tokens in {measured['rows_with_identical_tokens']} of {measured['rows']} rows.",
                table(["", "batch", "tokens a second", "tokens a CPU second"], rows),
            ]
    return section(
        "Summaries: generation", "summarize_generation.py", names,
        f"fp32, {read(names[0])['threads']} threads, each side at its best batch, transformers "
        "at the better of its static and its dynamic cache; medians of rounds in turn. Where "
        "answers are short, more of the time is the prompts', where both sides do the same work.",
        *parts,
    )  # fmt: skip


def flat(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def summarize_training() -> str:
    names = [f"summarize_training{suffix}" for suffix in SUMMARIZE_MODELS]
    sides = {
        "tpukit": "tpukit",
        "trainer": "transformers' Trainer, grouped by length",
        "padded": "padded to 1,024",
    }
    parts = []
    for name, model in zip(names, SUMMARIZE_MODELS.values(), strict=True):
        found = read(name)
        rows = [
            [sides[side], values["best"]["rows"],
             *(f"{statistics.median(r[rate] for r in values['rounds']):.1f}"
               for rate in ("tokens_per_second", "tokens_per_cpu_second"))]
            for side, values in found["sides"].items()
        ]  # fmt: skip
        parts += [
            f"{model}, global batch size {found['effective_batch']}: "
            f"{found['ratio_to_trainer']:.2f} times the Trainer's, "
            f"{found['ratio_to_padding']:.1f} times those of padding.",
            table(["", "micro-batch", "tokens a second", "tokens a CPU second"], rows),
        ]
    return section(
        "Summaries: training speed", "summarize_training.py", names,
        f"Tokens without padding, fp32, {read(names[0])['threads']} threads, each side at the best "
        "of its settings. GPT-2 was measured while tpukit took oneDNN's products on this make of "
        "CPU, which it does no longer; with torch's on all sides its first ratio was 1.48.",
        *parts,
    )  # fmt: skip


def summarize_quality() -> str:
    found = read("summarize_quality")
    return section(
        "Summaries: quality", "summarize_quality.py", ["summarize_quality"],
        f"A GPT-2 of 0.9 million parameters trained from scratch on {found['training_rows']:,} "
        f"generated dialogues in {found['training_minutes']} minutes ({found['threads']} threads), "
        f"tested on {found['test_samples']:,} with names, topic combinations and phrasings that "
        f"the training data lack. It copies {found['unseen_names_copied']:.0%} of those names "
        "right.",
        table(["", "ROUGE-L"], [
            ["trained", interval([found["rougeL"], *found["rougeL_95"]], 3)],
            ["nearest training summary", f"{found['rougeL_nearest']:.3f}"],
            ["first line", f"{found['rougeL_lead']:.3f}"],
        ]),
    )  # fmt: skip


def summarize_rows() -> str:
    found = read("summarize_rows")
    return section(
        "Summaries: tokenising",
        "summarize_rows.py",
        ["summarize_rows"],
        f"{found['rows']:,} dialogues are tokenised in {found['tokenising_seconds']:.0f} s, "
        f"{found['rows_tokenised_per_second']:,.0f} a second; the largest process takes "
        f"{found['largest_process_bytes'] / GIB:.2f} GiB, training included.",
    )


def eit_simulation() -> str:
    found = read("eit_simulation")
    solves = found["forward_solves_per_cpu_second"]
    rows = [
        ["samples, with files", found["with_files"]["per_cpu_second"]],
        ["samples, with files and linear reconstructions",
         found["with_files_and_recon"]["per_cpu_second"]],
        ["samples, no files", found["without_files_per_cpu_second"]],
        ["forward solves, changes of one inverse", solves["changes_of_one_inverse"]],
        ["forward solves, a factorisation each", solves["factorisation_a_sample"]],
    ]  # fmt: skip
    return section(
        "The EIT simulator",
        "eit_simulation.py",
        ["eit_simulation"],
        f"A mesh of {found['nodes']:,} nodes. The two ways to solve differ by "
        f"{solves['largest_difference']:.0e}.",
        table(["", "per CPU second"], rows),
    )


def torch_tpu_compile() -> str:
    found = read("torch_tpu_compile")
    rows = [
        [n["network"], f"{n['eager']['launched_a_step']:.0f}",
         f"{n['compiled']['launched_a_step']:.0f}", f"{n['ratio_of_times_median']:.2f}",
         f"{min(n['ratios_of_times']):.2f} to {max(n['ratios_of_times']):.2f}"]
        for n in found["networks"]
    ]  # fmt: skip
    versions = found["versions"]
    return section(
        "torch_tpu: eager against torch.compile", "torch_tpu_compile.py", ["torch_tpu_compile"],
        f"Programs launched by a training step ({found['rows']} rows, fp32, torch_tpu "
        f"{versions['torch_tpu']}, torch {versions['torch']}), and the time of an eager step over "
        "a compiled one's on the CPU, through a PJRT plugin: not a TPU's.",
        table(["network", "eager", "compiled", "time, median", "range of the blocks"], rows),
    )  # fmt: skip


def torch_tpu_compiler() -> str:
    found = read("torch_tpu_compiler")
    answers = sorted(
        found["answers"],
        key=lambda a: [a[n] for n in ("network", "rows", "stack", "attention", "effort", "libtpu")],
    )
    rows = [
        [f"{a['network']}, {a['rows']} rows", a["stack"], a["attention"], a["libtpu"], a["effort"],
         *([a["refusal"].partition("memory on HBM, the ")[2].partition(". ")[0], *[""] * 5]
           if "refusal" in a else
           [f"{a['total'] / GIB:.2f}", f"{a['arguments'] / GIB:.2f}", f"{a['code'] / GIB:.2f}",
            f"{a['flops'] / 1e12:.2f}", f"{a['bytes_accessed'] / 1e9:.0f}",
            f"`{a['largest'][0]['shape']}` {a['largest'][0]['size_bytes'] / GIB:.2f}"])]
        for a in answers
    ]  # fmt: skip
    head = ["network", "stack", "attention", "libtpu", "effort", "GiB", "state", "code", "TFLOP",
            "GB moved", "largest buffer"]  # fmt: skip
    return section(
        "The TPU compiler's answer for torch_tpu and for torch_xla",
        "torch_tpu_compiler.py",
        ["torch_tpu_compiler"],
        "One training step in bf16 (forward, backward, clipping, AdamW, for EIT EMA weights) "
        "recorded as one program and compiled for one v5e chip, without a TPU. `GiB` is all that "
        "it needs at once. torch_xla's plain program is compiled by both releases of libtpu: the "
        "rest of the difference is the stacks'. `plain`: attention written out.",
        table(head, rows),
    )


def doctor_start() -> str:
    found = read("doctor_start")
    rows = [
        [f"`{command}`", f"{values['seconds']:.2f}", f"{values['mib']:.0f}"]
        for command, values in found["commands"].items()
    ]
    scan = found["scan"]
    return section(
        "Start-up",
        "doctor_start.py",
        ["doctor_start"],
        f"Medians of {found['repeats']} runs. `tpukit doctor PATH` scans {scan['files']:,} files "
        f"in {scan['seconds']:.1f} s.",
        table(["command", "seconds", "MiB"], rows),
    )


def doctor_scan() -> str:
    found = read("doctor_scan")
    scan, parse = (found["processor_seconds"][side] for side in ("scan", "parse"))
    return section(
        "`tpukit doctor PATH`",
        "doctor_scan.py",
        ["doctor_scan"],
        f"{found['files']:,} files of installed packages that import torch ({found['lines']:,} "
        f"lines), processor time, median of {found['repeats']} runs: {scan:.2f} s, where Python's "
        f"parser alone takes {parse:.2f} s for them. {found['parsed_by_scan']} of them are parsed; "
        "the text of the others holds no finding.",
    )


def run_overhead() -> str:
    found = read("run_overhead")
    rows = [
        [name, f"{values['milliseconds_in_1000_lines']:.2f}",
         f"{values['processor_milliseconds_in_1000_lines']:.2f}", f"{values['start_seconds']:.2f}"]
        for name in ("pipe", "terminal")
        for values in [found[name]]
    ]  # fmt: skip
    return section(
        "What `tpukit run` costs",
        "run_overhead.py",
        ["run_overhead"],
        f"A program that prints {found['lines']:,} lines, each written by itself, with and without "
        "`tpukit run`; below zero, the difference is less than the runs differ.",
        table(["output", "ms in 1,000 lines", "processor ms in 1,000 lines", "start (s)"], rows),
    )


def gpualert_corpus() -> str:
    found = read("gpualert_corpus")
    rows = [
        [part, n["logs"], n["with_a_cause"], n["by_an_entry"], f"{n['accuracy']:.1%}",
         f"{n['macro_f1']:.3f}"]
        for part, n in found.items()
        if part in ("injected", "wild")
    ]  # fmt: skip
    return section(
        "`tpukit doctor --explain` on GPUAlert's corpus",
        "gpualert_corpus.py",
        ["gpualert_corpus"],
        "Logs of arXiv 2607.01409 with its labels, counted by its scorer. Its texts were read "
        "while entries were written: its classes are covered, which says nothing of other logs.",
        table(["part", "logs", "a cause first", "by an entry", "accuracy", "macro-F1"], rows),
    )


def public_models() -> str:
    found = read("public_models")["models"]
    rows = [
        [name, m["verdict"], m["seconds"], "" if m["verdict"] == "trains" else m["says"][0][2:162]]
        for name, m in found.items()
    ]
    return section(
        "`trains_on_tpu` on public models",
        "public_models.py",
        ["public_models"],
        "As their own code builds them, and known faults of some. Two cores that other work "
        "shared: seconds are upper bounds.",
        table(["model", "verdict", "s", "says"], rows),
    )


def gpu_memory_public() -> str:
    found = read("gpu_memory_public")
    looked = [m for m in found["measurements"] if "error" in m]
    rows = [
        [f"[{m['name']}]({m['source']})", m["versions"], m["target"], m["counts"],
         f"{m['error_first']:+.1%}" if m["first_predicted"] else
         "yes" if m["predicted_first"] else "no", f"{m['measured_bytes'] / GIB:.2f}",
         f"{m['predicted_bytes'] / GIB:.2f}", f"{m['error']:+.1%}", f"{m['error_as_then']:+.1%}"]
        for m in looked
    ]  # fmt: skip
    failed = [m for m in found["measurements"] if not m["fitted"]]
    asked = [f for f in found["fits"] if "right" in f]
    fits = [[f[key] for key in ("name", "fits", "predicted", "predicted_as_then")] for f in asked]
    changed = sum(bool(m["then"]) for m in looked)
    return section(
        "Memory on GPUs: predicted beside public measurements",
        "gpu_memory_public.py",
        ["gpu_memory_public"],
        "Peaks that others measured on GPUs, with their settings, beside what `probe-batch "
        "--target` predicts for them. Predicted first: the prediction was written down before the "
        "figure was looked at (with its error, where it was kept); of the first 19 the simulation "
        "of two steps came after that, and took ViT-L in fp32 from +4.1 % to +0.2 % of its figure. "
        f"{changed} of the {len(looked)} runs had a torch that kept more (softmax saved its input "
        "before 1.11, Adam's form for lists had two temporaries until July 2023): the last column "
        "is by the same trace with that put back. "
        f"Median error {found['median_error']:.1%}, largest {found['largest_error']:.1%}; as then "
        f"{found['median_error_as_then']:.1%} and {found['largest_error_as_then']:.1%}. The "
        f"first {found['predicted_blind_1']} with a figure in the column were first predicted to "
        f"{found['median_error_first_1']:.1%} in the median and "
        f"{found['largest_error_first_1']:.1%} at most. What was missing then was mostly in "
        "the settings of the runs: Liger-Kernel's own "
        "matrix beside the measured one, the loss of Barlow Twins as it was in 2023, gradients "
        "that are None in the forward pass (torchao), a norm in fp32 and logits that the loop "
        "holds (lit-gpt). One thing was in the prediction: a gradient that adds up at indices is "
        "sorted on a GPU (Barlow Twins). lightly publishes one decimal. A second set of "
        f"{found['predicted_blind_2']} (litgpt's finetuning table, layers of Liger-Kernel): "
        f"{found['median_error_first_2']:.1%} in the median, {found['beyond_12_2']} beyond 12 %. "
        "Three (two of llama-3.2, phi-3) hold less than weights, gradients and moments take in "
        "bf16, by hand 4 times the weights, although their settings name AdamW. The process of two "
        "(`liger-embedding`) held 12 GiB before: with a table of 1,024 rows its figure is 12.07 "
        "GiB; what larger tables add agrees to 0.3 %. Of swiglu and geglu the given gradient was "
        "missing, which their loop holds.",
        table(["run", "versions", "GPU", "counts", "predicted first", "measured (GiB)",
               "predicted (GiB)", "error", "as then"], rows),
        f"Whether it fits, of the {len(found['measurements'])} runs, {len(failed)} of which ended "
        f"out of memory ({', '.join(m['name'] for m in failed)}): {found['runs_right']} predicted.",
        "The largest batch of a ladder (16, 24, 32, 48, ... 512) that fits an RTX 3090 in fp16 "
        "with SGD, by timm's published training benchmark (torch 1.12) and predicted before that "
        f"was looked at: {found['fits_right']} of {found['fits_asked']} the same. As then: a "
        "context of 1.3 GiB (before CUDA 11.7 it held every kernel), one batch instead of those "
        "sent ahead, and gradients that stay through the forward pass; found after the first ten, "
        f"before the others: {found['fits_right_as_then']} of {found['fits_asked']}.",
        table(["model", "fitted", "predicted", "as then"], fits),
    )  # fmt: skip


def gpu_measured() -> str:
    found = read("gpu_measured")
    measured = [case for case in found["cases"] if case.get("measured_bytes")]
    rows = [
        [c["name"], c["batch"], c["precision"], f"{c['measured_bytes'] / GIB:.2f}",
         f"{c['predicted_first'] / GIB:.2f}",
         c["then"] if "then" in c else f"{c['predicted_bytes'] / GIB:.2f}", f"{c['off']:+.1%}"]
        for c in measured
    ]  # fmt: skip
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    largest = max(abs(case["off"]) for case in measured if "then" not in case)
    return section(
        "Memory on a GPU: predicted beside measured",
        "gpu_measured.py",
        ["gpu_measured"],
        f"One trial of `probe-batch` each on an {found['device']} ({versions}), eager: the peak of "
        "what torch reserved, beside the prediction of the code of that day and of today's. "
        f"Median difference today {found['median_off']:.1%}, largest {largest:.1%}. EIT took twice "
        "what was predicted: the bias of its windows lay so that no kernel took it, and torch "
        "computed plain attention. It is laid out for the kernels now, so that today's prediction "
        "is of another step, which no GPU has run yet.",
        table(["step", "batch", "precision", "measured (GiB)", "predicted that day (GiB)",
               "today (GiB)", "difference"], rows),
    )  # fmt: skip


def gpu_search_seconds() -> str:
    found = read("gpu_search_seconds")
    rows = [
        [m["model"], f"{m['seconds']:.1f}", f"{m['processor_seconds']:.1f}", f"{m['load']:.0f}",
         m["trials"], m["largest"], m["recommended"]]
        for m in found["models"]
    ]  # fmt: skip
    return section(
        "Seconds of a search without the GPU",
        "gpu_search_seconds.py",
        ["gpu_search_seconds"],
        "`probe-batch --target t4` from the command line to its end, on "
        f"{found['cores']} cores; load: the processes that ran or waited for them.",
        table(["model", "seconds", "processor seconds", "load", "trials", "largest batch",
               "recommended"], rows),
    )  # fmt: skip


def gpu_memory_on_cpu() -> str:
    found = read("gpu_memory_on_cpu")
    rows = [
        [m["model"], f"{m['predicted_bytes'] / 2**20:.1f}", f"{m['measured_bytes'] / 2**20:.1f}",
         f"{m['error']:+.2%}"]
        for m in found["models"]
    ]  # fmt: skip
    return section(
        "Tensors of a step: predicted beside measured",
        "gpu_memory_on_cpu.py",
        ["gpu_memory_on_cpu"],
        "Peak of live tensors by the trace behind `probe-batch --target t4`, with operators in the "
        "CPU's forms, and by torch's profiler in a real step on a CPU: fp32, 8 rows of 64 x 64; "
        "what a CPU's convolution allocates while it runs is left out of both. "
        f"Median error {found['median_error']:.2%}, largest {found['largest_error']:.2%}, "
        f"{len(found['models'])} of the script's models.",
        table(["model", "predicted (MiB)", "measured (MiB)", "error"], rows),
    )


def doctor_real_material() -> str:
    sums = read("doctor_real_material")["summary"]
    halves = {"learn": "learned from", "measure": "measured"}
    texts = [
        [words, n["texts"], n["right"], n["wrong"], n["unknown"], f"{n['right_share']:.1%}"]
        for half, words in halves.items()
        for n in [sums["texts"][half]]
    ]
    clean = "; ".join(
        f"{words}: {sums['clean'][half]['false_alarms']} of {sums['clean'][half]['logs']}"
        for half, words in halves.items()
    )
    parts = [
        "Error texts of public threads, split by source into a half that the rules were learned "
        "from and a half that no rule was tuned on; right means that the first answer names the "
        "cause.\n\n" + table(["half", "texts", "right", "wrong", "no cause named", "right"], texts),
        f"Logs without an error of which a cause was named ({clean}).",
    ]
    if "files" in sums:
        files = [
            [words, n["files"], n["right"], n["false"], n["missed"]]
            for half, words in halves.items()
            for n in [sums["files"][half]]
        ]
        parts.append(table(["half", "files", "findings", "false", "missed"], files))
    return section(
        "`tpukit doctor` on texts and code that nobody here wrote", "doctor_real_material.py",
        ["doctor_real_material"], *parts,
    )  # fmt: skip


def doctor_blind() -> str:
    sums = read("doctor_blind")["summary"]
    verdicts = ("right", "not first", "imprecise", "honest", "nothing", "wrong")
    clean: Counter[str] = Counter()
    for part in [part for part in sums if part.endswith(", clean")]:
        clean.update(sums.pop(part)["first"])
    rows = [
        [part, sum(n["first"].values()), *(n["first"].get(verdict, 0) for verdict in verdicts),
         n["now"].get("right", 0)]
        for part, n in sums.items()
    ]  # fmt: skip
    asked = ", ".join(f"`{part}`: {count}" for part, count, *_ in rows if "," not in part)
    kinds = ("too general", "family missing", "not parsed", "another family", "ranked second")
    whys = [[part, *(n["kind"].get(kind, 0) for kind in kinds)]
            for part, n in sums.items() if "," not in part]  # fmt: skip
    text = (
        "Public logs in no earlier set: causes written first, asked once, judged by hand. "
        f"{asked} of the twelve months to November 2026 (14 of `blind_11` and 7 of `blind_12` are "
        f"older), and {sum(clean.values())} clean logs, of which {clean.get('no cause', 0)} were "
        "given no cause. All sets, and what was wrong: "
        "[doctor_measured.md](doctor_measured.md#logs). Not first: right, but second or as a "
        "warning; imprecise: true of the family, without the cause or with advice for another "
        "case; honest: unknown, and said so. The last column is seen while fixing, not blind."
    )
    tables = [table(["logs", "asked", *verdicts, "right now"], rows), "How a miss came about:"]
    return section(
        "`tpukit doctor --explain` on logs that it had not seen", "doctor_real_material.py --blind",
        ["doctor_blind"], text, "\n\n".join([*tables, table(["logs", *kinds], whys)]),
    )  # fmt: skip


ATTACKS = {
    "fuzz": "ten fuzzed inputs of one reader or of ten options",
    "damage": "one file of a run damaged, the run used and resumed",
    "kill": "a training (one process, workers, ranks, shards, XLA) or the making of a data set, "
    "killed or held one to three times, then left alone",
    "starve": "a full disk, short files, no file handles, a tiny /dev/shm, no home, no compiler, "
    "no temporary folder, a clock that jumps",
    "two-writers": "two trainings into one folder",
}


def campaign() -> str:
    found = read("campaign")
    rows = [
        [ATTACKS[kind], counts["attacks"], counts["failures"], counts["planned"]]
        for kind, counts in found["kinds"].items()
    ]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return "\n\n".join([
        "## Attacks",
        "An attack fails where it ends in anything but a correct result or an error of tpukit's in "
        "one or two lines; a run that was killed or damaged must end in the same bytes.",
        table(["attack", "made", "failed", "in the whole campaign"], rows),
        "`PYTHONPATH=.:scripts:tests/support python -m campaign`, "
        f"[campaign.json](../../benchmarks/results/campaign.json){stale('campaign')}; {versions}.",
    ])  # fmt: skip


def host_time() -> str:
    rows = read("host_time")["rows"]
    return section(
        "The host's time of a step on a TPU", "host_time.py", ["host_time"],
        f"[host_time.md](host_time.md) has {len(rows)} models and numbers of virtual devices, "
        "traced and recorded, and below which batch a chip waits for the host.",
    )  # fmt: skip


def tpu_predictions() -> str:
    found = read("tpu_predictions")
    rows = sum("error" not in row for row in found.values())
    return section(
        "What a TPU will do: estimates", "tpu_predictions.py", ["tpu_predictions"],
        f"[tpu.md](tpu.md) has {rows} searches by the TPU compiler: batches, memory, operations, "
        "and at least the time of a step, for each task and preset. Nothing of it was measured.",
    )  # fmt: skip


SECTIONS = {
    "eit_quality": eit_quality,
    "eit_speed_cpu": eit_speed,
    "eit_tpu_v5e-1": eit_tpu,
    "tpu_predictions": tpu_predictions,
    "engine_cost_cpu_tiny": engine_cost,
    "host_time": host_time,
    "probe_compiler_gpt2": compiler_trials,
    "probe_peers_eit": probe_peers,
    "image_loading": image_loading,
    "image_accuracy": image_accuracy,
    "tpu_batches": tpu_batches,
    "activation_memory": activation_memory,
    "step_traffic": step_traffic,
    "first_step": first_step,
    "summarize_generation": summarize_generation,
    "summarize_training": summarize_training,
    "summarize_quality": summarize_quality,
    "summarize_rows": summarize_rows,
    "eit_simulation": eit_simulation,
    "torch_tpu_compile": torch_tpu_compile,
    "torch_tpu_compiler": torch_tpu_compiler,
    "doctor_start": doctor_start,
    "doctor_scan": doctor_scan,
    "run_overhead": run_overhead,
    "gpualert_corpus": gpualert_corpus,
    "public_models": public_models,
    "gpu_memory_public": gpu_memory_public,
    "gpu_measured": gpu_measured,
    "gpu_memory_on_cpu": gpu_memory_on_cpu,
    "gpu_search_seconds": gpu_search_seconds,
    "doctor_real_material": doctor_real_material,
    "doctor_blind": doctor_blind,
    "campaign": campaign,
}
"""Each section's first file, and what writes it; a section whose file is absent is left out."""


def page() -> str:
    written = [write() for name, write in SECTIONS.items() if (RESULTS / f"{name}.json").exists()]
    return "\n\n".join([INTRODUCTION, *written]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
