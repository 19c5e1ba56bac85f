"""Weights in Hugging Face's files: safetensors of published models, into shards and back.

    names         which tensors of a file make up one of our parameters
    files         a folder of safetensors: what it holds, slices of it, and how to write one
    pretrained    first values of a run from such a folder, each rank reading only what it keeps
    export        a checkpoint as such a folder: `python -m runtime.weights.export`

Nothing is imported here: most callers need one of them.
"""
