"""Small models that hide nothing: grouped heads, odd vocabulary, biases and norms that matter."""

import copy
import inspect
from functools import cache

import torch
from torch.nn import functional

from costmodels.job import Precision, TrainingJob
from costmodels.model import ModelSpec
from runtime.capture.repeated_layers import capture_model
from runtime.communication.grid import GROUP_AXES
from runtime.communication.mesh import Group, Mesh
from runtime.lower import compute_dtype, lower_captured
from runtime.models import build_model

SEQ = 16
NUM_LAYERS = 4


def llama(**changes):
    facts = {
        "name": "small-llama",
        "architecture": "llama",
        "hidden_size": 32,
        "num_layers": NUM_LAYERS,
        "num_attention_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 4,
        "ffn_hidden_size": 48,
        "vocab_size": 101,
        "training_seq_len": 64,
    }
    return ModelSpec(**{**facts, **changes})


def gpt2(**changes):
    facts = {
        "name": "small-gpt2",
        "architecture": "gpt2",
        "hidden_size": 32,
        "num_layers": NUM_LAYERS,
        "num_attention_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 4,
        "ffn_hidden_size": 128,
        "vocab_size": 101,
        "training_seq_len": 64,
        "gated_ffn": False,
        "norm": "layernorm",
        "tied_embeddings": True,
        "num_position_embeddings": 64,
        "qkv_bias": True,
        "attention_output_bias": True,
        "ffn_bias": True,
        "rope_theta": None,
    }
    return ModelSpec(**{**facts, **changes})


MODELS = {
    "llama": llama(),
    "llama-tied": llama(tied_embeddings=True),
    "llama-biases": llama(qkv_bias=True, attention_output_bias=True, ffn_bias=True),
    "qwen3": llama(architecture="qwen3", qk_norm="per-head"),
    "gpt2": gpt2(),
}


def job(**changes):
    facts = {"seq_len": SEQ, "global_batch_size": 8, "precision": Precision.FP32}
    return TrainingJob(**{**facts, **changes})


def weights(model, seed=0, scale=0.2):
    """Return random values by name: biases are not zero, norms are not one, ties are one."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, parameter in model.named_parameters():
        draw = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        values[name] = 1 + 0.3 * draw if is_norm else scale * draw
    return values


def batch(size=2, seed=1, vocab_size=101):
    """Return tokens and next tokens; the first sequence has most of the ignored labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (size, SEQ + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, : SEQ // 2] = -100
    labels[-1, -1] = -100
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels}


def reference(model, values, data):
    """Return the summed loss of the plain module and its gradients by name."""
    model = model.to_empty(device="cpu") if next(model.parameters()).is_meta else model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    model.zero_grad()
    positions = torch.arange(SEQ).expand(len(data["input_ids"]), -1)
    known = inspect.signature(model.forward).parameters
    given = {"position_ids": positions} if "position_ids" in known else {}
    output = model(data["input_ids"], **given)
    logits = output if isinstance(output, torch.Tensor) else output[0]
    loss = functional.cross_entropy(logits.flatten(0, 1), data["labels"].flatten(), reduction="sum")
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def plain_model(spec):
    return build_model(spec, seq_len=SEQ, device="cpu")


@cache
def _captured(spec, seq_len, dtype):
    return capture_model(spec, seq_len=seq_len, dtype=dtype)


def lowered(spec, job, layout, **options):
    """Do what `lower_graph` does, but trace each model once for all its layouts: seconds each."""
    captured = copy.deepcopy(_captured(spec, job.seq_len, compute_dtype(job)))
    return lower_captured(captured, job, layout, **options)


def lone_mesh(layout, place=None):
    """Return the mesh of a process that is alone, at a place of a layout's grid."""
    place = place or {}
    groups = {
        axis: Group(axis=axis, ranks=(0,), index=place.get(axis, 0), backend="none", handle=None)
        for axis in GROUP_AXES
    }
    return Mesh(layout=layout, rank=0, device=torch.device("cpu"), groups=groups)
