"""Small faults that somebody could make, each with the tests that should notice."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One change of one place."""

    file: str
    """Below megalite/."""
    old: str
    """Stands in the file once."""
    new: str
    tests: str
    """What is run, as pytest takes it, below tests/."""


MUTANTS = (
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
        "engine/native/replication.py",
        "bucket, _Message(works, mine, everybodys)\n",
        "bucket, _Message(works, mine, everybodys)\n            self._gatherings[number][1].wait()\n",
        "engine/test_replication.py",
    ),
    Mutant(
        "parallel/messages.py",
        "dist.all_reduce(x, group=axis.group, async_op=True)",
        "dist.all_reduce(x, group=axis.group)",
        "layers/test_overlapped.py",
    ),
    Mutant(
        "parallel/messages.py",
        "    arrival = _arrival(work, parts)\n",
        "    work.wait()\n    arrival = _arrival(None, parts)\n",
        "layers/test_overlapped.py",
    ),
    Mutant(
        "parallel/messages.py",
        "        )\n    make(axis.rank, parts[axis.rank])\n",
        "        )\n        works.pop().wait()\n    make(axis.rank, parts[axis.rank])\n",
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
        "architecture/weights.py",
        "cut=0, bias=mlp.bias)",
        'cut=0, bias=mlp.bias and part == "up")',
        "model/test_weights.py config/test_plan.py",
    ),
    Mutant(
        "parallel/context.py",
        "key=lambda rank: (loads[rank], rank)",
        "key=lambda rank: rank",
        "parallel/test_context.py",
    ),
    Mutant(
        "parallel/context.py",
        "KeySpan(query, end - begin, first, end - first)",
        "KeySpan(query, end - begin, first, end - first - (border == end))",
        "parallel/test_context.py",
    ),
    Mutant(
        "parallel/collectives.py",
        "return _scatter_sum(grad[order], ctx.axis), None, None, None",
        "return grad[order].chunk(ctx.axis.size)[ctx.axis.rank], None, None, None",
        "layers/test_context.py",
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
        "engine/batch_cut.py",
        "is_there = positions == batch.positions + depth",
        "is_there = positions >= batch.positions",
        "engine/test_layouts.py::test_layouts_that_predict_further_equal_plain_pytorch",
    ),
    Mutant(
        "engine/batch_cut.py",
        "tokens.where(is_there, NO_TOKEN)",
        "tokens",
        "engine/test_layouts.py::test_layouts_that_drop_choices_equal_plain_pytorch",
    ),
    Mutant(
        "engine/partition.py",
        'return weight.layer == "embedding" and axes.pp.rank > 0',
        "return False",
        "engine/test_layouts.py::test_layouts_that_predict_further_equal_plain_pytorch",
    ),
    Mutant(
        "model/prediction.py",
        "return None, grad, *([grad * ctx.weight] * others)",
        "return None, grad, *([grad] * others)",
        "engine/test_layouts.py::test_layouts_that_predict_further_equal_plain_pytorch",
    ),
    Mutant(
        "engine/fsdp2/shards.py",
        "first = min(-(-rows // replicas.size) * replicas.rank, rows)",
        "first = min(rows // replicas.size * replicas.rank, rows)",
        "checkpoint/test_matrix.py",
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
        "parallel/mesh.py",
        "ranks[first :: self.ep] for ranks",
        "ranks[first * len(ranks) // self.ep : (first + 1) * len(ranks) // self.ep] for ranks",
        "engine/test_layouts.py::test_layouts_of_experts_equal_plain_pytorch",
    ),
    Mutant("architecture/costs.py", "(4.0 + 2.0 * share)", "(3.9 + 2.0 * share)", "config/test_plan.py"),
    Mutant("architecture/costs.py", "+ 6.0 * mixing if", "+ 4.0 * mixing if", "planner/test_state_of_groups.py"),
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
    Mutant("optim/averaging.py", "largest = max(self.largest, lr)", "largest = lr", "optim/test_references.py"),
    Mutant("optim/elementwise.py", "alpha=beta * share)", "alpha=beta)", "optim/test_references.py"),
    Mutant(
        "checkpoint/averaged_weights.py",
        "return average_of(found,",
        "return (lambda w, *_: w)(found,",
        "train/test_schedule_free.py",
    ),
    Mutant("optim/qk_clip.py", '("weight", "bias", SCALE)', '("weight", "bias")', "engine/test_qk_clip.py"),
    Mutant("model/lora.py", "alpha=self._lora.scale", "alpha=1.0", "checkpoint/test_hf_lora.py"),
    Mutant(
        "architecture/attention_costs.py",
        "mean_span = window - window * window / (2 * seq_len)",
        "mean_span = window / 2",
        "config/test_plan.py",
    ),
    Mutant(
        "architecture/architecture.py",
        'self.norm_placement in ("after", "both", "post")',
        'self.norm_placement == "after"',
        "model/test_transformer.py planner/test_traffic.py",
    ),
    Mutant(
        "config/batch_sizes.py",
        "(step - span.first_step) *",
        "(step - span.first_step + 1) *",
        "config/test_batch_sizes.py",
    ),
    Mutant("config/load.py", "{} if value is None and", "{} if value == 0 and", "config/test_load.py"),
    Mutant("config/brought.py", "        if given:\n", "        if not given:\n", "test_plugin_options.py"),
    Mutant(
        "plugins.py",
        "if name in self._entries:\n            raise PluginError(",
        "if False:\n            raise PluginError(",
        "test_plugins.py",
    ),
    Mutant("data/order.py", "while value >= self.size:", "while value > self.size:", "data/test_order.py"),
    Mutant("data/best_fit.py", "size = min(left, seq_len)", "size = min(left, seq_len - 1)", "data/test_pack.py"),
    Mutant(
        "corpus/rules/rule.py",
        "rejected &= statistics[:, self.per] >= self.min_units",
        "rejected &= statistics[:, self.per] > self.min_units",
        "corpus/rules/test_apply.py",
    ),
    Mutant(
        "corpus/near/curve.py",
        "return 1.0 - (1.0 - similarity**rows) ** bands",
        "return 1.0 - (1.0 - similarity**bands) ** rows",
        "corpus/near/test_settings.py corpus/near/test_bands.py",
    ),
    Mutant(
        "stations/tasks.py",
        "    if _report_path(work, number).is_file():\n        return\n",
        "",
        "stations/test_tasks.py",
    ),
    Mutant(
        "parallel/mesh.py",
        "rest, cp = divmod(rest, self.cp)",
        "cp, rest = divmod(rest, self.cp)",
        "parallel/test_mesh.py",
    ),
    Mutant(
        "parallel/collectives.py",
        '_ops.all_reduce(x.contiguous(), "sum"',
        '_ops.all_reduce(x.contiguous(), "avg"',
        "layers/test_cross_entropy.py",
    ),
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
    Mutant(
        "train/loop.py",
        "if high**2 != size * squares_of_high or low**2 != size * squares_of_low:",
        "if False:",
        "train/test_brought_ranks.py train/test_plugins.py",
    ),
    Mutant(
        "architecture/initial.py", "(2 * model.num_layers) ** 0.5", "model.num_layers**0.5", "model/test_initialize.py"
    ),
    Mutant(
        "optim/schedules.py",
        "num_drops = (k - 1) //",
        "num_drops = k //",
        "optim/test_schedules.py optim/test_schedules_reference.py",
    ),
    Mutant(
        "optim/adaptive.py",
        "len(norms) < MIN_NORMS",
        "len(norms) <= MIN_NORMS",
        "optim/test_references.py optim/test_gradients.py",
    ),
    Mutant(
        "optim/elementwise.py",
        "torch._foreach_mul_(weights, 1.0 - lr * decay)",
        "torch._foreach_mul_(weights, 1.0 - decay)",
        "optim/test_references.py",
    ),
    Mutant("engine/hooks.py", "reversed(list(self.around_update))", "list(self.around_update)", "engine/test_hooks.py"),
    Mutant(
        "checkpoint/format.py",
        "if found is None or checksum != found[1]:",
        "if found is None:",
        "checkpoint/test_format.py",
    ),
    Mutant(
        "checkpoint/hf/rope_json.py",
        "DEFAULT_THETA = 10000.0",
        "DEFAULT_THETA = 500000.0",
        "checkpoint/test_hf_config.py",
    ),
    Mutant(
        "train/spike_detector.py",
        "is_cut = step <= self._cut_until",
        "is_cut = step < self._cut_until",
        "train/test_spikes.py",
    ),
    Mutant(
        "train/spike_detector.py",
        "self._settings.cut_factor if step <= self._cut_until",
        "self._settings.cut_factor if step < self._cut_until",
        "train/test_spikes.py",
    ),
    Mutant(
        "train/heartbeat.py",
        "if len(self._products) == NUM_PRODUCTS else",
        "if self._products else",
        "train/test_watch.py",
    ),
    Mutant(
        "train/loop.py",
        "num_updates=self.progress.num_updates + (not result.skipped)",
        "num_updates=self.progress.num_updates + 1",
        "train/test_loop.py train/test_health.py",
    ),
    Mutant(
        "slurm/outcome.py",
        "if EXIT_BAD_INPUT in {end.how for end in ends}:",
        "if {EXIT_BAD_INPUT} == {end.how for end in ends}:",
        "slurm/test_outcome.py",
    ),
    Mutant("slurm/stall.py", "now - moved <= max(", "now - moved <= min(", "slurm/test_goodput.py"),
    Mutant(
        "optim/groups.py",
        "(1.0 if group is None else group.lr_scale)",
        "1.0",
        "optim/test_weight_groups.py",
    ),
    Mutant("optim/groups.py", "decay /= optimizer.lr * scale", "decay /= optimizer.lr", "optim/test_weight_groups.py"),
    Mutant(
        "optim/optimizer.py",
        "given, decay = list(torch._foreach_add(given, weights, alpha=decay)), 0.0",
        "given = list(torch._foreach_add(given, weights, alpha=decay))",
        "optim/test_weight_groups.py",
    ),
    Mutant(
        "optim/gradients.py",
        "everywhere = [not part.is_copy for part in slices]",
        "everywhere = counted",
        "engine/test_weight_groups.py",
    ),
    Mutant(
        "engine/deepspeed/frozen.py",
        "cleared[found] = 0.0",
        "cleared[found.start] = 0.0",
        "engine/test_weight_groups.py",
    ),
    Mutant(
        "optim/schedules.py",
        "begin, peak = end, _rate(end - begin, end - begin, top, phase, measured)",
        "begin, peak = end, top",
        "optim/test_phases.py",
    ),
    Mutant(
        "config/shares.py", "(counts[rank] + 1) / speeds[rank]", "counts[rank] / speeds[rank]", "train/test_balance.py"
    ),
    Mutant(
        "engine/steps.py",
        "loss_weights(batch).double().sum()",
        "batch.loss_mask.double().sum()",
        "engine/test_loss_weights.py",
    ),
    Mutant(
        "data/gather.py",
        "stream.weights[token]",
        "stream.weights[token - 1]",
        "data/test_gather.py tokenizer/test_chat.py",
    ),
)
