"""The factors of the maximal update parametrization (muP), as plain arithmetic on a filled model.

With m = hidden_size / base_hidden_size (Yang et al. 2022, table 8; Dey et al. 2024, "The practitioner's guide"):

                        usual                muP
    embedding           E                    embedding_multiplier x E
    attention           q k' / sqrt(d)       q k' sqrt(d_base) / d
    logits              h W'                 h W' x output_multiplier / m
    matrices in blocks  N(0, s^2), rate lr   N(0, s^2 / m), rate lr / m for Adam
    tables, head, norms, biases              as usual

Each is 1 for a model without muP, and at the base width unless a multiplier is set.
"""

from __future__ import annotations

from megalite.architecture.architecture import Architecture
from megalite.architecture.weights import Weight


def width_multiplier(model: Architecture) -> float:
    """m, by which the inputs of most matrices have grown."""
    return 1.0 if model.mup is None else model.hidden_size / model.mup.base_hidden_size


def ffn_multiplier(model: Architecture) -> float:
    """The same for the matrix that leads out of the MLP."""
    if model.mup is None or model.mup.base_ffn_hidden_size is None:
        return width_multiplier(model)
    return model.ffn_hidden_size / model.mup.base_ffn_hidden_size


def input_multiplier(weight: Weight, model: Architecture) -> float:
    """How many times more inputs a matrix-like weight has than in the base model; 1 for vector-like ones.

    Matrix-like, with both dims growing with the width, are the matrices of the blocks. Tables and the head grow in one
    dim, norms and biases too; these are vector-like and treated as usual.
    """
    if not weight.is_matrix or not weight.is_inner:
        return 1.0
    return ffn_multiplier(model) if weight.name.endswith("mlp.down.weight") else width_multiplier(model)


def embedding_scale(model: Architecture) -> float:
    """Factor on the output of the embedding."""
    return model.embedding_scale * (1.0 if model.mup is None else model.mup.embedding_multiplier)


def output_scale(model: Architecture) -> float:
    """Factor on the logits, applied to the normalised stream before the head."""
    return 1.0 if model.mup is None else model.mup.output_multiplier / width_multiplier(model)
