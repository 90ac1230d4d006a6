"""Writes tests/fuzz/corpus: the initial inputs of the fuzz targets, a folder for each target."""

import base64
import ctypes
import gzip
import json
import pathlib
import struct

SOURCE = pathlib.Path(__file__).resolve().parents[2]
CORPUS = SOURCE / "tests/fuzz/corpus"


def write(target, name, content):
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def dataset_index(code, width, lengths, bounds, modes=b""):
    pointers, end = [], 0
    for length in lengths:
        pointers.append(end)
        end += length * width
    return (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
            + struct.pack(f"<{len(lengths)}i", *lengths)
            + struct.pack(f"<{len(lengths)}q", *pointers)
            + struct.pack(f"<{len(bounds)}q", *bounds) + modes)


def index_cache(description, documents, starts, order):
    numbers = [number for start in starts for number in start]
    return (b"LSINDEX\1" + struct.pack("<Q", len(description)) + description
            + struct.pack("<QQ", len(documents), len(order))
            + struct.pack(f"<{len(documents)}i", *documents)
            + struct.pack(f"<{len(numbers)}q", *numbers) + struct.pack(f"<{len(order)}q", *order))


def safetensors(tensors, data=0):
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header)) + header + bytes(data)


def alphabet():
    """The character of each byte in GPT-2's files."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return ({byte: chr(byte) for byte in printed}
            | {byte: chr(256 + i) for i, byte in enumerate(others)})


def gpt2(merges):
    letters = alphabet()
    encoder = {letters[byte]: byte for byte in range(256)}
    for merge in merges:
        encoder[merge.replace(" ", "")] = len(encoder)
    lines = "#version: 0.2\n" + "".join(f"{merge}\n" for merge in merges)
    return json.dumps(encoder).encode() + b"\0" + lines.encode()


def ranks(tokens, first):
    return "".join(f"{base64.b64encode(token).decode()} {first + i}\n"
                   for i, token in enumerate(tokens))


def zstd(text):
    library = ctypes.CDLL("libzstd.so.1")
    library.ZSTD_compressBound.restype = library.ZSTD_compress.restype = ctypes.c_size_t
    room = library.ZSTD_compressBound(ctypes.c_size_t(len(text)))
    frame = ctypes.create_string_buffer(room)
    size = library.ZSTD_compress(frame, ctypes.c_size_t(room), text, ctypes.c_size_t(len(text)), 3)
    return frame.raw[:size]


LINES = (b'{"text": "a\\n\\u00e9\\ud83d\\ude00", "id": [1, -2.5e3, true, null, {"n": {}}]}\r\n\n'
         b'{"id": 1}\n{"text": 7}\nplain\n{"text": "first", "text": "\xe2\x82\xac"}')

MANIFEST = """format_version: 1
iteration: 10
consumed_samples: 160
optimizer_steps: 9
scaler { scale: 65536 growth_tracker: 3 hysteresis_tracker: 2 }
layout { world_size: 2 tensor: 1 pipeline: 1 virtual_pipeline: 1 context: 1 expert: 1
  expert_tensor: 1 order: "tp-cp-ep-dp-pp" distributed_optimizer: true optimizer_instances: 1 }
block_bytes: 1048576
file { name: "rank-0.safetensors" size: 200 block_crc32: [305419896] }
file { name: "rank-1.safetensors" size: 100 block_crc32: [1] }
tensor { name: "a.weight" state: "" dtype: "F32" shape: [4, 3]
  piece { file: 0 offset: 96 start: [0, 0] size: [4, 3] first: 0 last: 7 }
  piece { file: 1 offset: 8 start: [0, 0] size: [4, 3] first: 7 last: 12 } }
tensor { name: "a.weight" state: "exp_avg" dtype: "F32" shape: [4, 3]
  piece { file: 0 offset: 0 start: [0, 0] size: [2, 3] first: 0 last: 6 }
  piece { file: 1 offset: 40 start: [2, 0] size: [2, 3] first: 0 last: 6 } }
"""

ENVIRONMENTS = {
    "torchrun": "RANK=3\nWORLD_SIZE=8\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\nMASTER_ADDR=10.0.0.1\n"
                "MASTER_PORT=29500\nTORCHELASTIC_USE_AGENT_STORE=True\nTORCHELASTIC_RUN_ID=a\n"
                "TORCHELASTIC_RESTART_COUNT=0",
    "slurm": "SLURM_PROCID=5\nSLURM_NTASKS=20\nSLURM_LOCALID=1\nSLURM_NODEID=1\n"
             "SLURM_STEP_NODELIST=node[03-05,9],login1\nSLURM_STEP_TASKS_PER_NODE=8(x2),4\n"
             "SLURM_JOB_ID=77\nSLURM_STEP_ID=0\nSLURM_RESTART_COUNT=0",
    "open_mpi": "OMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=1\n"
                "OMPI_COMM_WORLD_LOCAL_SIZE=2\nPMIX_NAMESPACE=prterun-host-77@1",
    "run_id": "LOCKSTEP_RUN_ID=x\nRANK=0\nWORLD_SIZE=1\nLOCAL_RANK=0\nLOCAL_WORLD_SIZE=1\n"
              "MASTER_ADDR=localhost\nMASTER_PORT=1",
    "none": "PATH=/bin",
}

SPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
# Changes to the samples of hugging_face_sample.h.
HUGGING_FACE_PATCHES = {
    "gpt2": {"normalizer": None, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
    "digits": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "Split", "pattern": {"String": "the"}, "behavior": "Removed", "invert": True},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]}},
    "regex": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {
            "Regex": "(?i:ab|c{2,3})|[^\\s\\p{L}a-z]{1,2}|(?:x|\\S)+(?!\\n)|\\s"}},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}},
    "metaspace": {"normalizer": None, "pre_tokenizer": SPACE, "decoder": SPACE},
    "merges": {"normalizer": {"type": "Replace", "pattern": {"String": "th"}, "content": "a"},
               "model": {"ignore_merges": True, "merges": ["h e"], "byte_fallback": False}},
}

CONFIG = (SOURCE / "configs/tiny.textproto").read_text()


def main():
    write("config", "tiny", CONFIG)
    write("config", "overrides", CONFIG + "\0model.num_layers=3\noptimizer.lr=1e-4\n"
          "data.split=949,50,1\ndata.blend=0.3,0.7\ntrain.rampup_batch_size=4 4 100\n"
          "optimizer.lr_decay_style=WSD\noptimizer.lr_wsd_decay_iters=10\nddp.bucket_size=7")
    write("config", "parallel", 'parallel { tensor_model_parallel_size: 2 order: "tp-cp-ep-dp-pp" '
          'sequence_parallel: true } model { activation: "gelu" } # comment')
    for name, text in ENVIRONMENTS.items():
        write("launch_environment", name, text)
    write("dataset_index", "two_documents", dataset_index(8, 2, [3, 2], [0, 1, 2]))
    write("dataset_index", "empty", dataset_index(4, 4, [], [0]))
    write("dataset_index", "modes", dataset_index(1, 1, [2, 1, 0, 9], [0, 2, 2, 4], b"\0\1\0\3"))
    write("dataset_index", "long", dataset_index(5, 8, [7, 0, 30, 12, 1], [0, 1, 3, 5]))
    write("index_cache", "small", index_cache(b"samples", [1, 0, 2], [(0, 0), (0, 4), (2, 1)],
                                              [1, 0]))
    write("index_cache", "none", index_cache(b"", [], [(0, 0)], []))
    write("safetensors", "two", safetensors(
        {"__metadata__": {"format": "pt"},
         "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
         "b": {"dtype": "BF16", "shape": [20], "data_offsets": [24, 64]}}, 64))
    write("safetensors", "empty", safetensors({}))
    write("safetensors", "scalar", safetensors(
        {"s": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
         "n": {"dtype": "U8", "shape": [0, 5], "data_offsets": [8, 8]}}, 8))
    write("safetensors_index", "shards", json.dumps(
        {"metadata": {"total_size": 24}, "weight_map": {
            "lm_head.weight": "model-00002-of-00002.safetensors",
            "model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}, indent=2))
    write("gpt2_vocabulary", "merges", gpt2(["t h", "Ġ t", "Ġt h", "Ġth e", "th e", "1 2", "æ Ŀ"]))
    write("gpt2_vocabulary", "bytes", gpt2([]))
    write("tiktoken_ranks", "merges", ranks([b" t", b"he", b" the", b"12", b"\xe6\x9d", b"the"], 256))
    write("tiktoken_ranks", "gap", ranks([b"th", b"the"], 256) + ranks([b" th"], 259))
    write("gpt2_encoding", "words", "Hello world's 123 tests,  we'll\n\n see \t東京 ١٢٣ ½ é e\u0301 ")
    write("gpt2_encoding", "bytes", b"\xff\xc0\xaf \xed\xa0\x80'\xf4\x90\x80\x80 '' 'l 'll")
    write("hugging_face_encoding", "words", "<s>Hello the  the's 123,\n\n <mask> café e\u0301a "
          "\u1100\u1161 東京 </s>  <|endoftext|> ")
    write("hugging_face_encoding", "bytes", b"\xff\xc0 \xed\xa0\x80'\xf4\x90 the\xe4\xb8 caf\xc3")
    for name, patch in HUGGING_FACE_PATCHES.items():
        write("hugging_face_tokenizer", name, json.dumps(patch, ensure_ascii=False))
    write("manifest", "small", MANIFEST)
    write("json_lines", "lines", b"\4" + LINES)
    write("json_lines", "mark", b"\0\xef\xbb\xbf" + LINES + b"\n")
    write("compressed_input", "members", gzip.compress(LINES, mtime=0)
          + gzip.compress(b"", mtime=0) + bytes(3) + gzip.compress(LINES * 20, mtime=0))
    write("compressed_input", "frames", zstd(LINES) + zstd(b"") + zstd(LINES * 20))
    write("hugging_face_config", "llama", json.dumps(
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
         "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": 256,
         "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
         "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}))
    write("hugging_face_config", "llama3", json.dumps(
        {"model_type": "llama", "hidden_size": 64, "intermediate_size": 172,
         "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
         "vocab_size": 256, "rope_parameters": {
             "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}))
    write("hugging_face_config", "qwen3_moe", json.dumps(
        {"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 172,
         "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 32, "max_position_embeddings": 128, "vocab_size": 256,
         "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0,
         "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [1]}))
    write("hugging_face_config", "qwen2", json.dumps(
        {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 172,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 128, "vocab_size": 256, "use_sliding_window": True,
         "sliding_window": 16, "layer_types": ["sliding_attention", "sliding_attention"]}))
    write("hugging_face_config", "gpt2", json.dumps(
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2,
         "n_head": 4, "n_positions": 128, "n_ctx": 128, "vocab_size": 256, "n_inner": None,
         "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "attn_pdrop": 0.0,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "tie_word_embeddings": True}))


if __name__ == "__main__":
    main()
