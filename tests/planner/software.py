"""Other training software, by the formulas of the planner: its programs (time) and its stacks (memory), for published measurements."""

from __future__ import annotations

from dataclasses import replace

from moe.plan.job.states import Storage
from moe.plan.machine.program import OWN, OWN_ON_CPU, Program, Updates
from moe.plan.memory.stack import Stack

# XLA fuses Adafactor (arXiv 1804.04235, algorithms 4 and 5) into three passes over gradients: means of squares over rows and columns; size
# of the update, by which it is clipped; the update. The last reads and writes weights, whose size is read before (12 bytes); the third
# reading of gradients takes 4. Counted from the algorithm, not measured. Its runs use no other optimizer.
FUSED = Updates(adafactor=16.0, decay=0.0)
# Muon's products in bf16, as in Moonlight's code (github.com/MoonshotAI/Moonlight, examples/toy_train.py); its other operators as here
IN_BF16 = Updates(products="bf16")
MIXED_BOTH_GRADIENTS = Storage(2, 6, 12)  # 16 bits with two copies of the gradients, as in DeepSpeed's bf16 optimizer
PROGRAMS = {
    program.name: program
    for program in (
        OWN,
        OWN_ON_CPU,
        # Megatron-LM of 2021: fused softmax and bias kernels, gradient sums after the backward pass, partial messages between stages
        Program("megatron-2021", attention="scores", launch_us=28, checkpoint_us=50, gradients="after"),
        # Megatron-LM of 2022: a weight gradient's product adds to the sum in memory, without an addition of its own
        Program("megatron-2022", attention="scores", launch_us=28, checkpoint_us=50, gradients="after", accumulates="within"),
        # Megatron-DeepSpeed: the same layers under DeepSpeed's engine; pointwise kernels less fused
        Program("megatron-deepspeed", attention="scores", launch_us=28, checkpoint_us=50, gradients="after", pointwise=1.25),
        # Megatron-DeepSpeed's pipeline engine with bf16. MT-NLG on Selene and BLOOM on Jean Zay both take a sixth longer than Megatron-LM's
        # engine with the same layers, devices and layout. This factor is measured; its causes are not known in detail.
        Program(
            "megatron-deepspeed-bf16",
            attention="scores",
            launch_us=28,
            checkpoint_us=50,
            gradients="after",
            pointwise=1.25,
            engine=0.12,
        ),
        # Megatron-Core since 2023: fused attention; gradient sums overlap with the backward pass, half of tp's collectives with products
        Program(
            "megatron-core",
            launch_us=20,
            tensor_overlap=0.5,
            interleaved_transfers="overlapped",
            experts="each",
            accumulates="within",
            parameters="overlapped",
            updates=IN_BF16,
        ),
        # Megatron-Core's own FSDP, which sums gradients in 16 bits
        Program("megatron-fsdp", launch_us=20, tensor_overlap=0.5, experts="each", accumulates="within", sent_gradients="computed"),
        # DeepSpeed's ZeRO-3 of 2021, which gathers parameters one by one (Megatron SC21, Table 2: 17 GB/s a rank)
        Program("deepspeed-zero3-2021", attention="scores", launch_us=30, gathers="partly", gather_gb_s=17, checkpoint_us=300),
        # DeepSpeed's ZeRO since 2022, and users' eager models on it
        Program("deepspeed", attention="scores", launch_us=25, pointwise=2.0),
        # nanotron: eager, with fused attention, norms and rotations
        Program("nanotron", launch_us=15, pointwise=1.5, checkpoint_us=0),
        # torch's FSDP, eager and compiled; torchtitan's selective recomputation repeats every second product
        Program("fsdp", launch_us=20, pointwise=2.0, selective="half"),
        Program("fsdp-compiled", launch_us=10, selective="half"),
        # XLA: pointwise operators are fused, attention scores are written to memory, one launch runs a whole program
        Program("xla", attention="scores", launch_us=2, gradients="after", transfers="whole", updates=FUSED),
    )
}
# Megatron-LM: fused activations keep gate and up and their product; its fused bias-dropout-add writes masks for any probability.
# Logits: 2 in 16 bits, 4 in fp32 and 4 for their exponentials.
MEGATRON = Stack("megatron", masks="always", logits=10)
MEGATRON_2022 = Stack("megatron-2022", masks="always", core="scores", lse=0, logits=10)
# its pipeline keeps the outputs of stages that were sent. DeepSpeed's buckets have 5e8 elements.
MEGATRON_DEEPSPEED = Stack(
    "megatron-deepspeed", masks="always", core="scores", lse=0, logits=10, outputs="kept", bucket_elements=5e8, reduce_bytes=2
)
# torchtitan: FSDP2 of fp32 shards; selective keeps every second product's output (q, v, w1, w2) and attention's output, nothing else.
# Logits: the result of log-softmax, its gradient and its input's gradient, 4 bytes each (fp32); the logits themselves are freed by then.
TORCHTITAN = Stack(
    "torchtitan",
    gated=4,
    activation_of=2,
    selective=(("norm_outputs", 0.0), ("attention", 0.9), ("network", 0.5), ("activation", 0.0)),
    logits=12,
)
FSDP = Stack("fsdp", gated=4, activation_of=2, logits=12)
# DeepSpeed's defaults: stage 3 keeps up to 1e9 parameters whole; buckets have 5e8 elements.
DEEPSPEED = Stack(
    "deepspeed", gated=4, activation_of=2, core="scores", logits=12, gathers="elements", gathered=1e9, bucket_elements=5e8, reduce_bytes=2
)
# DeepSeek-V3's software (arXiv 2412.19437, sections 3.2.3, 3.3.2 and 3.3.3) recomputes norms, up-projections and SwiGLU's output.
# It keeps inputs of products in 8 bits. `pending`: W multiplies 8 bits, so an output's gradient is assumed to wait in 8 bits too.
# `selective`: fraction that is kept of attention, 18,752 of 86,336 elements a token (its output, the latents before their norms, the
# log-sum-exp, in 16 bits); of experts, (D + 2 F) / 2 (D + 3 F) (a row, the outputs of gate and up); of dense networks, half (the outputs
# of gate and up).
DEEPSEEK = replace(
    MEGATRON,
    name="deepseek",
    masks="dropout",
    pending=0.5,
    selective=(("norm_outputs", 0.0), ("attention", 0.217), ("experts", 0.423), ("network", 0.5), ("activation", 0.0)),
)
NANOTRON = Stack("nanotron", gated=4, activation_of=2, logits=12)
