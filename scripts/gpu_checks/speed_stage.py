"""Stage 4: milliseconds of a training step at three sizes, against PyTorch, round by round."""

import json
import pathlib
import random
import statistics
import struct
import sys

from .commands import CommandFailed, Server
from .machine_stage import gpu
from .report import FAILED, VALUE

NAME, SECONDS = "speed", 220
PEER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks/peer_cuda.py"
LENGTH, VOCABULARY, MICRO_BATCHES = 2048, 50304, 2
# Dense bf16 TFLOP/s, as NVIDIA publishes them, by a part of nvidia-smi's name. The longest counts.
PEAKS = {"H100": 989, "H100 PCIe": 756, "H100 NVL": 835, "H200": 989, "H200 NVL": 835, "H800": 989,
         "GH200": 989, "A100": 312, "B200": 2250}


class Size:
    """A Llama-style model. `together`: the rivals fit on the device at the same time."""

    def __init__(self, name, layers, hidden, heads, ffn, micro_batch=4, together=True):
        self.name, self.layers, self.hidden, self.heads = name, layers, hidden, heads
        self.ffn, self.micro_batch, self.together = ffn, micro_batch, together
        self.length, self.vocabulary = LENGTH, VOCABULARY

    def config(self, data, micro_batch=None):
        micro = micro_batch or self.micro_batch
        return f"""
model {{
  num_layers: {self.layers} hidden_size: {self.hidden} num_attention_heads: {self.heads}
  ffn_hidden_size: {self.ffn} seq_length: {self.length} vocab_size: {self.vocabulary}
}}
ddp {{ overlap_grad_reduce: true }}
optimizer {{ lr: 1e-4 weight_decay: 0.1 adam_beta2: 0.95 clip_grad: 1 }}
data {{ path: "{data}" }}
train {{
  micro_batch_size: {micro} global_batch_size: {micro * MICRO_BATCHES} eval_iters: 0
  train_iters: 100000 precision: "bf16"
}}
"""

    def peer(self):
        """The sizes as config.json of an exported checkpoint has them."""
        return {"hidden_size": self.hidden, "intermediate_size": self.ffn,
                "num_attention_heads": self.heads, "num_key_value_heads": self.heads,
                "num_hidden_layers": self.layers, "vocab_size": self.vocabulary,
                "max_position_embeddings": self.length, "rms_norm_eps": 1e-5, "rope_theta": 1e4}

    def flops_per_token(self, parameters):
        return 6 * parameters + 12 * self.layers * self.hidden * self.length


SIZES = (Size("125M", 12, 768, 12, 2048), Size("350M", 24, 1024, 16, 2752),
         Size("1.3B", 24, 2048, 16, 5504, together=False))


def small():
    """A model for a trial on the CPU."""
    size = Size("trial", 2, 64, 4, 128, micro_batch=1)
    size.length, size.vocabulary = 32, 512
    return size


def write_tokens(folder, tokens=1 << 22, vocabulary=VOCABULARY):
    """Writes 16 documents of random ids below 2^15 in Megatron's format; returns the prefix."""
    prefix = pathlib.Path(folder) / "tokens"
    ids = bytearray(random.Random(1).randbytes(2 * tokens))
    highest = min(0x7F, (vocabulary - 1) >> 8)  # high byte, so 256 ids each
    ids[1::2] = ids[1::2].translate(bytes(i % (highest + 1) for i in range(256)))
    documents = 16
    length = tokens // documents
    lengths = struct.pack(f"<{documents}i", *[length] * documents)
    places = struct.pack(f"<{documents}q", *[2 * length * i for i in range(documents)])
    ends = struct.pack(f"<{documents + 1}q", *range(documents + 1))
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, documents, documents + 1)
    pathlib.Path(f"{prefix}.idx").write_bytes(head + lengths + places + ends)
    pathlib.Path(f"{prefix}.bin").write_bytes(ids)
    return prefix


def write_config(context, size, data, micro_batch=None):
    path = context.folder / f"{size.name}_{micro_batch or size.micro_batch}.textproto"
    path.write_text(size.config(data, micro_batch))
    return path


def ours_command(context, config, *words, options=()):
    return [context.bundle / "benchmarks/gpu_bench", "--device", context.device, *options, "steps",
            config, *words]


def peer_command(context, size, mode):
    return [sys.executable, PEER, json.dumps(size.peer()), mode, context.device,
            str(size.micro_batch), str(MICRO_BATCHES)]


def rivals(context, size, data):
    """Returns {name: (command, environment)}."""
    ours = (ours_command(context, write_config(context, size, data)), context.bundle.environment())
    plain = context.bundle.callers_environment()
    return {"ours": ours} | {mode: (peer_command(context, size, mode), plain)
                             for mode in ("eager", "compile")}


class Contender:
    """A running rival: its number of parameters, and its milliseconds by round."""

    def __init__(self, context, name, command, environment):
        self.name, self.times, self.peak = name, [], 0
        self._context = context
        self._server = Server(command, environment)

    def begin(self):
        self.parameters = self._server.answer(self._context.seconds(60))["parameters"]
        self._server.ask(3, self._context.seconds(90))  # PyTorch compiles here

    def measure(self, steps):
        answer = self._server.ask(steps, self._context.seconds(60))
        self.times.append(answer["ms"])
        self.peak, self.loss = answer["peak_bytes"], answer["loss"]

    def close(self):
        self._server.close()

    def told(self, size, peak_tflops, micro_batch=None):
        ms = statistics.median(self.times)
        tokens = (micro_batch or size.micro_batch) * MICRO_BATCHES * size.length / ms * 1e3
        text = f"{ms:.1f} ms a step [{min(self.times):.1f}, {max(self.times):.1f}]"
        text += f", {tokens / 1e3:.1f}k tokens/s"
        if peak_tflops:
            share = tokens * size.flops_per_token(self.parameters) / (peak_tflops * 1e12)
            text += f", MFU {share:.1%}"
        return f"{text}, {self.peak / 2**30:.1f} GiB"


def measure_rivals(context, size, data, steps=5, rounds=3):
    """Returns {name: Contender}; one that fails becomes a row, and the others go on."""
    done, sources = {}, rivals(context, size, data)
    groups = [list(sources)] if size.together else [[name] for name in sources]
    for names in groups:
        working = begin_all(context, size, {name: sources[name] for name in names})
        for round_ in range(rounds):
            for contender in working[::1 if round_ % 2 else -1]:
                if context.attempt(f"{size.name}, {contender.name}",
                                   lambda: contender.measure(steps), None):
                    done[contender.name] = contender
        for contender in working:
            contender.close()
    return {name: contender for name, contender in done.items() if contender.times}


def begin_all(context, size, sources):
    """Returns the contenders that have started; they load at the same time."""
    contenders = [Contender(context, name, *source) for name, source in sources.items()]
    working = []
    for contender in contenders:
        if context.attempt(f"{size.name}, {contender.name}", contender.begin, None):
            working.append(contender)
        else:
            contender.close()
    return working


def add_rows(context, size, found, peak_tflops):
    for name, contender in found.items():
        text = contender.told(size, peak_tflops)
        if name != "ours" and "ours" in found:
            ratios = [theirs / ours for ours, theirs in zip(found["ours"].times, contender.times)]
            text += f"; theirs / ours {statistics.median(ratios):.2f}"
        context.add(f"{size.name}, {name}", VALUE, text)
    counts = {name: contender.parameters for name, contender in found.items()}
    if len(set(counts.values())) > 1:
        context.add(f"{size.name}, parameters", FAILED, f"not the same model: {counts}")


def measure_one(context, size, data, words=(), micro_batch=None, options=()):
    """Measures one variant of ours."""
    command = ours_command(context, write_config(context, size, data, micro_batch), *words,
                           options=options)
    contender = Contender(context, "ours", command, context.bundle.environment())
    try:
        contender.begin()
        for _ in range(2):
            contender.measure(4)
    finally:
        contender.close()
    return contender


def peak_of(context):
    """Returns None for a GPU that PEAKS lacks. The machine stage may not have run."""
    told = next((row.detail for row in context.report.rows if row.check == "nvidia-smi"), None)
    if told is None:
        try:
            told = gpu(context)
        except CommandFailed:
            return None
    names = [name for name in PEAKS if name in told]
    return PEAKS[max(names, key=len)] if names else None


def check(context):
    """Ours and PyTorch's eager mode train a small model on the CPU, with equal parameter counts."""
    size = small()
    data = write_tokens(context.folder, 1 << 15, size.vocabulary)
    device, context.device = context.device, "cpu"
    try:
        found = {}
        for name, (command, environment) in rivals(context, size, data).items():
            if name == "compile":  # needs a compiler that this machine may lack
                continue
            server = Server(command, environment | {"OMP_NUM_THREADS": "1"})
            try:
                begun, step = server.answer(context.seconds(60)), server.ask(1, context.seconds(60))
            finally:
                server.close()
            found[name] = begun["parameters"], step["loss"]
    finally:
        context.device = device
    if len({parameters for parameters, _ in found.values()}) != 1:
        raise CommandFailed(f"not the same model: {found}")
    for size in SIZES:
        context.run([context.bundle / "lockstep", "train", write_config(context, size, data),
                     "--print-config"], 30).needs()
    return "the rivals train a small model here: " + ", ".join(
        f"{name} {parameters} parameters, loss {loss:.3f}"
        for name, (parameters, loss) in found.items())


def run(context):
    data, peak = write_tokens(context.folder), peak_of(context)
    figures = context.report.documents.setdefault("speed", {})
    for size in reversed(SIZES):
        found = measure_rivals(context, size, data)
        figures[size.name] = {name: one.times for name, one in found.items()}
        add_rows(context, size, found, peak)
    size = SIZES[1]
    for micro_batch in (1, 8):
        context.attempt(f"{size.name}, micro-batch {micro_batch}", lambda: measure_one(
            context, size, data, micro_batch=micro_batch).told(size, peak, micro_batch), VALUE)
    for name, words in (("dropout", ["--set", "model.hidden_dropout=0.1"]),
                        ("8 experts", ["--set", "model.num_experts=8", "--set",
                                       f"model.moe_ffn_hidden_size={size.ffn // 2}"])):
        context.attempt(f"{size.name}, {name}", lambda: measure_one(
            context, size, data, words).told(size, None), VALUE)
