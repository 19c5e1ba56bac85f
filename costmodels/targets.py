"""What each target runtime really allocates: one record per `--target`, a reason per choice.

The cost formulas are the same for all; the runtimes differ in what they keep, in which format
and for how long. Numbers are bytes per value unless said otherwise.

Sources: the runtimes' public code, named per record; constants without a source of their own are
`chosen` to describe that code.
"""

from dataclasses import dataclass

from costmodels.job import Target, TrainingJob
from costmodels.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkBehaviour:
    """Memory habits of a runtime.

    Attributes:
        bf16_gradient_bytes: Gradient accumulation format of bf16 (and fp8) training.
        fp16_gradient_bytes: The same under fp16.
        fp32_gradients_beside: Under fp32 accumulation, 16-bit gradients exist too.
        reduces_in_16_bits: Gradients travel in the format of the products, whatever they are kept
            in.
        casts_to_master: At the step a shard's gradients are cast to the master weights' format,
            where that is another.
        step_bytes: Copies of its shard's gradients that the optimizer makes at the step, beside
            16-bit gradients (flattened, cast to fp32).
        flat_step_buffers: Those copies are few and large, so that no block that activations left
            can hold them.
        master_is_parameter: ZeRO-3 shards hold the fp32 weight only; 16-bit copies exist while
            gathered (FSDP2).
        cuts_gradients_late: Cut gradients come into being when a backward pass reduces them, so
            that the only micro-batch of a step meets none; stage 1's, once per step.
        collects_gradients: A unit's 16-bit gradients move into its reduction buffer one by one,
            while the last buffer of the unit behind is reduced; otherwise they wait beside their
            own.
        keeps_gathered_in_pipeline: With pipeline stages, ZeRO-3 gathers weights once per step and
            keeps them, and whole gradients too, over all micro-batches.
        keeps_ends_gathered: Embedding and head stay whole from forward to backward (FSDP's root).
        gathers_late: Under sequence parallelism, routing and the compression of latent attention
            take a rank's own tokens; no whole input of theirs is kept.
        saves_gathered_input: Column-parallel matrices keep the gathered input under sequence
            parallelism, rather than gather it again.
        unfused_gate: A gated activation keeps the activated gate beside its inputs.
        keeps_expert_answers: Answers of experts are weighed after they came back, so that they stay
            for the gradients of their weights; otherwise weights enter the experts' activation.
        compiled_gate: The gate is fused when the model is compiled.
        low_precision_inputs: fp8 matrix products keep their inputs in fp8.
        dummy_weight_gradients: A placeholder gradient stays allocated for each weight shape
            (Transformer Engine with fused weight-gradient accumulation).
        fused_weight_gradient: Weight gradients accumulate in the product; otherwise the largest
            one exists twice for a moment.
        largest_expert_share: Of a layer's routed experts, those that one tensor holds: a matrix of
            three, or both input matrices.
        logit_peak_bytes: Bytes per logit at the worst moment of head and loss, unfused loss.
        fused_logit_peak_bytes: The same with a fused or compiled loss.
        fuses_loss: The loss is one kernel where the job does not say.
        gathers_logits: An unfused loss works on the whole vocabulary on every tensor-parallel rank
            (torch's cross entropy, which knows no cut vocabulary).
        compiles_loss: The compiler that fuses the model fuses the loss too; off where the model
            is said not to be compiled.
        uncut_logit_peak_bytes: The same where the vocabulary is not cut and torch's own loss runs;
            None where the runtime has one loss.
        fused_loss_bytes: Bytes per logit that pass through memory in a fused loss, forward and
            backward: one kernel reads the logits and writes their gradient in place.
        logit_saved_bytes: Bytes per logit that stay from forward to backward.
        bucket_bytes: One communication bucket; stages 2 and 3 of ZeRO hold two beside activations
            (gradients, weights), stage 1 one at the step.
        vocab_multiple: The vocabulary is padded to a multiple of this times the tensor axis.
        selective_modules: What `--recompute selective` means where no modules are named.
        extra_groups: Communicators over all ranks, beside one per axis in use.
        keeps_stage_outputs: A stage's output stays until its backward pass, beside the copy that
            was sent (Megatron frees its data).
        offloads_by_tensor: Offloaded activations go one by one, as autograd saves them, and come
            back so; else by the layer, one on its way while one is at work.
        puts_off_operands_alone: Between the halves of a split backward, inputs and output gradients
            of linear layers stay; otherwise all that the layer kept does (torch's autograd graph).
        preallocates_messages: Receive buffers exist for all micro-batches from the start
            (torch.distributed.pipelining).
        message_groups: Groups of two ranks that a pipeline's messages go through.
        expandable_segments: The launcher turns the allocator's expandable segments on.

    """

    bf16_gradient_bytes: int
    fp16_gradient_bytes: int
    fp32_gradients_beside: bool = False
    reduces_in_16_bits: bool = False
    casts_to_master: bool = False
    step_bytes: int = 0
    flat_step_buffers: bool = False
    master_is_parameter: bool = False
    cuts_gradients_late: bool = False
    collects_gradients: bool = False
    keeps_gathered_in_pipeline: bool = False
    keeps_ends_gathered: bool = False
    gathers_late: bool = False
    saves_gathered_input: bool = False
    unfused_gate: bool = True
    keeps_expert_answers: bool = False
    compiled_gate: bool = True
    low_precision_inputs: bool = False
    dummy_weight_gradients: bool = False
    fused_weight_gradient: bool = False
    largest_expert_share: float = 1 / 3
    logit_peak_bytes: float = 14.0
    fused_logit_peak_bytes: float = 6.0
    uncut_logit_peak_bytes: float | None = None
    fused_loss_bytes: tuple[int, int] = (8, 6)
    logit_saved_bytes: float = 4.0
    fuses_loss: bool = True
    gathers_logits: bool = False
    compiles_loss: bool = False
    bucket_bytes: int = 0
    vocab_multiple: int = 1
    selective_modules: tuple[str, ...] = ("core_attn",)
    extra_groups: int = 0
    keeps_stage_outputs: bool = True
    offloads_by_tensor: bool = False
    puts_off_operands_alone: bool = False
    preallocates_messages: bool = False
    message_groups: int = 0
    expandable_segments: bool = False


BEHAVIOURS: dict[Target, FrameworkBehaviour] = {
    # Our own runtime (`planner verify` holds these against its dry run): flat fp32 gradient
    # buffers, 16-bit shards beside fp32 masters, collectives as autograd nodes (the products that
    # read their outputs save them), units per layer under ZeRO-3. The vocabulary-parallel loss
    # keeps 16-bit logits, fp32 scores and its 16-bit gradient (8 bytes); torch's own, fp32 scores,
    # log-probabilities and a gradient (12).
    Target.NATIVE: FrameworkBehaviour(
        bf16_gradient_bytes=4,
        fp16_gradient_bytes=4,
        casts_to_master=True,
        cuts_gradients_late=True,
        collects_gradients=True,
        saves_gathered_input=True,
        keeps_expert_answers=True,
        largest_expert_share=2 / 3,
        logit_peak_bytes=8.0,
        fused_logit_peak_bytes=8.0,
        uncut_logit_peak_bytes=12.0,
        keeps_stage_outputs=False,
        gathers_late=True,
        offloads_by_tensor=True,
        puts_off_operands_alone=True,
    ),
    # Megatron Core with Transformer Engine. Gradients are reduced in bf16 in NVIDIA's recipes
    # (Megatron Bridge, grad_reduce_in_fp32 off; peaks of its Moonlight and Qwen3 runs say so too);
    # `--grad-dtype fp32` is Megatron-LM's accumulation in fp32. fp16 keeps 16-bit ones and casts at
    # the step. Inputs are gathered again; bias-SwiGLU and weight-gradient accumulation are fused;
    # the fused loss works in place on fp32 logits (2 + 4 bytes) in three fused parts, between which
    # ranks talk: cast and maximum (6), shift, exponential and sum (8), division (8); then scale and
    # cast back (10). fp8 keeps its weights in fp8, once
    # per operand layout: what bf16 takes.
    Target.MEGATRON: FrameworkBehaviour(
        bf16_gradient_bytes=2,
        fp16_gradient_bytes=2,
        step_bytes=4,
        unfused_gate=False,
        low_precision_inputs=True,
        dummy_weight_gradients=True,
        keeps_stage_outputs=False,
        fused_weight_gradient=True,
        logit_peak_bytes=10.0,
        fused_logit_peak_bytes=6.0,
        fused_loss_bytes=(22, 10),
        vocab_multiple=128,
        extra_groups=1,
    ),
    # torchtitan on FSDP2: fp32 shards, bf16 gathered, fp32 reduced gradients; with a pipeline
    # nothing is resharded between micro-batches; selective recompute is its per-operation policy;
    # its launcher turns expandable segments on. Its loss has been compiled since 2025 (16-bit
    # logits, their gradient, and a copy); before, and in eager runs, it held 14 bytes per logit.
    Target.TORCHTITAN: FrameworkBehaviour(
        bf16_gradient_bytes=4,
        fp16_gradient_bytes=4,
        master_is_parameter=True,
        keeps_gathered_in_pipeline=True,
        keeps_ends_gathered=True,
        saves_gathered_input=True,
        fused_logit_peak_bytes=6.0,
        compiles_loss=True,
        preallocates_messages=True,
        selective_modules=("per-op",),
        expandable_segments=True,
    ),
    # DeepSpeed ZeRO: 16-bit gradients, flattened and cast to fp32 for the shard at the step; with
    # fp32 accumulation both formats exist. Buckets of 5e8 values for reduction and gathering.
    # Losses of its users are eager: 16-bit logits (2), fp32 ones, log-probabilities, gradients of
    # both (4 each; Hugging Face drops the fp32 ones before). Its pipeline sends through groups
    # of two.
    Target.DEEPSPEED: FrameworkBehaviour(
        bf16_gradient_bytes=2,
        fp16_gradient_bytes=2,
        fp32_gradients_beside=True,
        step_bytes=6,
        flat_step_buffers=True,
        saves_gathered_input=True,
        logit_peak_bytes=18.0,
        fused_logit_peak_bytes=8.0,
        fuses_loss=False,
        gathers_logits=True,
        bucket_bytes=2 * 500_000_000,
        extra_groups=1,
        message_groups=2,
    ),
    # nanotron: fp32 gradient accumulation, eager SwiGLU, sharded loss; gathered inputs are kept
    # (its tp_recompute_allgather would gather them again).
    Target.NANOTRON: FrameworkBehaviour(
        bf16_gradient_bytes=4,
        fp16_gradient_bytes=4,
        saves_gathered_input=True,
        logit_peak_bytes=10.0,
    ),
    # Accelerate on FSDP: torch's own sharding; its mixed precision gathers and reduces in 16 bits
    # (FullyShardedDataParallelPlugin.set_mixed_precision), shards of gradients are fp32 and None
    # before a step's first backward pass (Trainer's zero_grad); selective checkpointing wraps a
    # share of the blocks (as fms-fsdp does), half of them here. The loss that Hugging Face's models
    # bring is eager and casts to fp32: 12 bytes per logit live at its peak (measured:
    # ForCausalLMLoss of transformers 5.24 where, as in Trainer, outputs are dropped before
    # backward; 14 where they are kept). Fused losses (flash-attn's kernel, llm-foundry's default)
    # read 16-bit logits and write their gradient.
    Target.ACCELERATE: FrameworkBehaviour(
        bf16_gradient_bytes=4,
        fp16_gradient_bytes=4,
        reduces_in_16_bits=True,
        master_is_parameter=True,
        cuts_gradients_late=True,
        keeps_ends_gathered=True,
        saves_gathered_input=True,
        logit_peak_bytes=12.0,
        fused_logit_peak_bytes=4.0,
        fuses_loss=False,
        gathers_logits=True,
        bucket_bytes=25 * MIB,
        selective_modules=("every-2nd-layer",),
    ),
}


def fuses_loss(job: TrainingJob) -> bool:
    """Tell whether one kernel scores the logits; an eager run has none where it is compiled."""
    behaviour, said = BEHAVIOURS[job.target], job.switches.fused_cross_entropy
    is_eager = behaviour.compiles_loss and job.switches.compile is False
    return (behaviour.fuses_loss if said is None else said) and not is_eager


def works_on_whole_logits(job: TrainingJob) -> bool:
    """Tell whether each tensor-parallel rank gathers the logits and scores all of them."""
    return BEHAVIOURS[job.target].gathers_logits and not (fuses_loss(job) or job.chunked_loss)
