"""Faults in the model and its layers."""

from __future__ import annotations

from mutant import Mutant

OF_MODEL = (
    Mutant(
        "model/transformer.py",
        "layer.gemm = overlap(layer, gemm, take, is_redone=is_redone, is_symmetric=self.spec.async_tp)",
        "layer.gemm = SummedLinear(layer.weight, gemm, take, is_redone=is_redone)",
        "layers/test_overlapped.py",
    ),
    Mutant(
        "model/transformer.py",
        "is_symmetric=self.spec.async_tp",
        "is_symmetric=False",
        "layers/test_overlapped.py",
    ),
    Mutant(
        "layers/triton_kernels.py",
        "totals = totals * tl.exp(maxima - larger) + tl.exp(logit - larger)",
        "totals = totals + tl.exp(logit - larger)",
        "layers/test_logits.py",
    ),
    Mutant(
        "layers/triton_kernels.py",
        "grad = grad * (1.0 - tanh * tanh)",
        "grad = grad * (1.0 - tanh)",
        "layers/test_logits.py",
    ),
    Mutant(
        "layers/triton_kernels.py",
        "second = second * c + first * s",
        "second = second * c - first * s",
        "layers/test_turn.py",
    ),
    Mutant("layers/logits.py", "(scale * self._unit)", "scale", "layers/test_logits.py layers/test_cross_entropy.py"),
    Mutant(
        "layers/turn.py",
        "rotate(grad_k, (cos, -sin))",
        "rotate(grad_k, (cos, sin))",
        "layers/test_turn.py",
    ),
    Mutant(
        "model/recompute.py",
        "return COMPILED_BUDGET if multiplies or not attention else 1.0",
        "return COMPILED_BUDGET",
        "model/test_compile.py",
    ),
    Mutant(
        "layers/documents.py",
        "share = ContextShare(whole, stretches[rank], own, order, torch.argsort(order),",
        "share = ContextShare(whole, stretches[rank], own, order, order,",
        "layers/test_context.py",
    ),
    Mutant(
        "layers/experts.py",
        "return routing._replace(weights=copy_to(routing.weights, self.tp))",
        "return routing",
        "layers/test_experts.py",
    ),
    Mutant(
        "layers/experts.py",
        "grad.index_select(0, inverse).unflatten(0, (-1, ctx.top_k)).sum(1)",
        "grad.index_select(0, inverse).unflatten(0, (-1, ctx.top_k)).mean(1)",
        "layers/test_experts.py",
    ),
    Mutant("layers/grouped.py", "parts[index].zero_()", "pass", "layers/test_experts.py"),
    Mutant(
        "layers/grouped.py",
        "is_spare = torch.arange(y.shape[0], device=y.device) >= sizes.sum()",
        "is_spare = torch.arange(y.shape[0], device=y.device) > sizes.sum()",
        "layers/fp8/test_grouped.py layers/test_experts.py",
    ),
    Mutant(
        "layers/capacity.py",
        "by_value = values.argsort(descending=True, stable=True)",
        "by_value = values.argsort(stable=True)",
        "layers/test_experts.py",
    ),
    Mutant(
        "layers/capacity.py",
        "else [x[share.places] for x in both]",
        "else [x[share.order] for x in both]",
        "engine/test_layouts.py::test_layouts_that_drop_choices_equal_plain_pytorch",
    ),
    Mutant(
        "layers/capacity.py",
        "for x in (chosen, weights.bfloat16())",
        "for x in (chosen, weights)",
        "engine/test_layouts.py::test_layouts_that_drop_choices_equal_plain_pytorch",
    ),
    Mutant(
        "layers/fp8/grouped.py",
        "rounded = self.round_matrices(matrices, transposed=is_back)",
        "rounded = self.round_matrices(matrices, transposed=False)",
        "layers/fp8/test_grouped.py",
    ),
    Mutant(
        "layers/fp8/precision.py",
        "= WeightSharding(experts.tp, cut)",
        "= WeightSharding(experts.tp, 1 - cut)",
        "layers/fp8/test_grouped.py",
    ),
    Mutant(
        "layers/latent_attention.py",
        "k = torch.cat((still, shared.unsqueeze(1).expand(-1, self.num_heads, -1)), dim=2)",
        "k = torch.cat((shared.unsqueeze(1).expand(-1, self.num_heads, -1), still), dim=2)",
        "engine/test_layouts.py::test_layouts_of_latent_attention_equal_plain_pytorch",
    ),
    Mutant(
        "layers/scores.py",
        "z[heads, rows] = torch.logaddexp(scores.logsumexp(-1, keepdim=True), z[heads, rows])",
        "z[heads, rows] = scores.logsumexp(-1, keepdim=True)",
        "layers/test_attention.py",
    ),
    Mutant(
        "model/prediction.py",
        "return None, grad, *([grad * ctx.weight] * others)",
        "return None, grad, *([grad] * others)",
        "engine/test_layouts.py::test_layouts_that_predict_further_equal_plain_pytorch",
    ),
    Mutant(
        "layers/router.py",
        "counts = reduce_from(counts, axis)",
        "counts = counts + 0",
        "engine/test_layouts.py::test_layouts_of_experts_equal_plain_pytorch",
    ),
    Mutant(
        "layers/router.py",
        "ranked = scores if bias is None else scores + bias",
        "ranked = scores",
        "layers/test_router.py",
    ),
    Mutant(
        "layers/dispatch.py",
        "order = (runs % mine.shape[1]).argsort(stable=True)",
        "order = (runs // ep.size).argsort(stable=True)",
        "engine/test_layouts.py::test_layouts_of_experts_equal_plain_pytorch",
    ),
    Mutant(
        "layers/low_rank.py",
        "self.a if self.cuts_inputs else copy_to(self.a, self.tp)",
        "self.a",
        "engine/test_lora.py",
    ),
    Mutant(
        "model/scales.py",
        "return copy_to if isinstance(layer, RowParallelLinear) and settings.group_size is None else keep",
        "return keep",
        "model/test_qat.py",
    ),
    Mutant(
        "layers/qat/learned.py",
        "self._ratio.abs() > self.layer.limit, 0.0",
        "self._ratio.abs() > 1e9, 0.0",
        "layers/test_qat.py",
    ),
    Mutant("layers/qat/learned.py", "self.scale < 0.0, -found", "self.scale < 0.0, found", "layers/test_qat.py"),
    Mutant("model/lora.py", "alpha=self._lora.scale", "alpha=1.0", "checkpoint/test_hf_lora.py"),
    Mutant(
        "layers/norm.py",
        "wide.square().mean(-1, keepdim=True) + eps)\n    return weight",
        "wide.square().mean(-1, keepdim=True))\n    return weight",
        "layers/test_norm.py",
    ),
    Mutant(
        "layers/cross_entropy.py",
        "(1.0 + 2.0 * head.spec.z_loss * log_z)",
        "(1.0 + head.spec.z_loss * log_z)",
        "layers/test_cross_entropy.py",
    ),
    Mutant(
        "layers/attention.py",
        "(columns > rows - window)\n        keys",
        "(columns >= rows - window)\n        keys",
        "layers/test_attention.py",
    ),
    Mutant(
        "layers/attention.py",
        "first_key = 0 if window is None else max(0, before + start - window + 1)",
        "first_key = 0 if window is None else max(0, before + start - window + 2)",
        "layers/test_attention.py",
    ),
    Mutant(
        "layers/attention_blocks.py",
        "_put(dq[tokens], of_queries.mul_(scores.scale), count)",
        "_put(dq[tokens], of_queries, count)",
        "layers/test_attention.py",
    ),
    Mutant("layers/cross_entropy.py", "* (own.maximum - largest).exp()", "", "layers/test_cross_entropy.py"),
)
