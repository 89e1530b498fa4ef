"""Names in other tools (Hugging Face, DeepSpeed, torchtitan, Megatron-LM, nanoGPT) for keys of a recipe and flags of `moe`, as tables.

"optimizer.lr": "learning_rate=3e-4 max_lr=6e-4"        a recipe key: its names in other tools, each with an example of a value
"""

from __future__ import annotations

# key -> its names in other tools, each with an example of a value. A user's value of such a name is kept, or translated by WORDS.
KEYS: dict[str, str] = {
    "model.d_model": "hidden_size=4096 hidden=4096 n_embd=768 dim=4096 hidden_dim=512 embed_dim=768 embedding_dim=768 "
    "emb_dim=768 model_dim=768",
    "model.num_layers": "num_hidden_layers=32 n_layer=12 n_layers=32 depth=12",
    "model.num_heads": "num_attention_heads=32 n_head=12 n_heads=32 nheads=12",
    "model.num_kv_heads": "num_key_value_heads=8 n_kv_heads=8 num_query_groups=8 n_kv_head=8",
    "model.head_size": "head_dim=128 kv_channels=128 qk_nope_head_dim=128 d_kv=64 d_head=64 dim_head=64",
    "model.d_ff": "intermediate_size=11008 ffn_hidden_size=4096 ffn_dim=2048 n_inner=3072 inter_dim=10944 d_inner=2048 d_ffn=2048 "
    "dim_feedforward=2048 mlp_hidden_size=2048 "
    "d_hidden=2048 ffn_size=2048",
    "model.ffn": "hidden_act=silu activation_function=gelu_new hidden_activation=gelu_pytorch_tanh activation=relu "
    "feed_forward_proj=gated-gelu mlp_activation=gelu",
    "model.norm": "normalization=RMSNorm norm_type=rmsnorm",
    "model.norm_eps": "rms_norm_eps=1e-6 layer_norm_eps=1e-5 layernorm_epsilon=1e-5 norm_epsilon=1e-5 layer_norm_epsilon=1e-5",
    "model.max_length": "max_position_embeddings=2048 n_positions=1024 n_ctx=1024 block_size=1024 seq_len=4096 seq_length=4096 "
    "max_seq_len=2048 max_seq_length=2048 sequence_length=512 context_length=2048 max_source_length=512 decoder_seq_length=512 "
    "ctx_len=512 context_size=512 context_len=512 "
    "context_window=512 maxlen=512 cutoff_len=1024",
    "model.positions": "position_embedding_type=rope",
    "model.rope.base": "rope_theta=10000 rotary_base=10000",
    "model.rope.fraction": "partial_rotary_factor=0.5 rotary_percent=0.5",
    "model.tied_embeddings": "tie_word_embeddings=false enable_weight_tying=true",
    "model.qkv_bias": "attention_bias=true add_qkv_bias=true",
    "model.dropout": "attention_dropout=0.1 attn_pdrop=0.1 resid_pdrop=0.1 hidden_dropout=0.1 hidden_dropout_prob=0.1 dropout_rate=0.1 "
    "embd_pdrop=0.1 embedding_dropout=0.1 residual_dropout=0.1",
    "model.vocab_size": "padded_vocab_size=50304 vocab=32000",
    "model.sliding_window": "window_size=4096",
    "model.logit_cap": "final_logit_softcapping=30",
    "model.ahead": "mtp_num_layers=1 num_nextn_predict_layers=1",
    "model.ahead_weight": "mtp_loss_scaling_factor=0.1",
    "model.latent.key_rank": "kv_lora_rank=512",
    "model.latent.query_rank": "q_lora_rank=1536",
    "model.latent.rotary_size": "qk_rope_head_dim=64",
    "model.latent.value_size": "v_head_dim=128",
    "model.moe_every": "moe_layer_freq=2 decoder_sparse_step=2 interleave_moe_layer_step=2 encoder_sparse_step=2 expert_interval=2 "
    "moe_freq=2 moe_layer_interval=2",
    "experts.num_experts": "num_local_experts=8 n_routed_experts=64 num_moe_experts=8 moe_num_experts=64 n_experts=8 "
    "num_experts_per_layer=8",
    "experts.d_ff": "moe_intermediate_size=768 moe_ffn_hidden_size=768 moe_inter_dim=1408",
    "experts.shared": "n_shared_experts=2 num_shared_experts=1",
    "router.num_choices": "num_experts_per_tok=2 num_experts_per_token=2 moe_router_topk=2 top_k=2 topk=2 moe_top_k=8 experts_per_token=4 "
    "num_selected_experts=2 "
    "router_topk=2",
    "router.balance_weight": "router_aux_loss_coef=0.01 moe_aux_loss_coeff=0.01 aux_loss_alpha=0.001 aux_loss_coef=0.01 "
    "aux_loss_weight=0.01 moe_loss_weight=0.01 load_balancing_loss_weight=0.01 load_balance_loss_weight=0.01 moe_aux_loss_weight=0.01 "
    "aux_loss=0.01",
    "router.z_weight": "router_z_loss_coef=0.001 moe_z_loss_coeff=0.001 moe_zloss_weight=0.001 zloss_weight=0.001",
    "router.jitter": "router_jitter_noise=0.01 moe_input_jitter_eps=0.01 jitter_noise=0.01",
    "router.capacity_factor": "moe_expert_capacity_factor=1.25 expert_capacity_factor=1.25 moe_capacity_factor=1.25 "
    "train_capacity_factor=1.25 moe_train_capacity_factor=1.25",
    "router.eval_capacity_factor": "moe_eval_capacity_factor=2.0",
    "router.score": "scoring_func=sigmoid score_func=sigmoid moe_router_score_function=sigmoid",
    "router.gate_scale": "routed_scaling_factor=2.5 route_scale=2.5 moe_router_topk_scaling_factor=2.5",
    "router.bias_rate": "load_balance_coeff=1e-3 moe_router_bias_update_rate=1e-3",
    "router.select": "topk_method=greedy",
    "router.drop": "moe_token_drop_policy=probs",
    "dispatch.kind": "moe_token_dispatcher_type=alltoall",
    "degrees.dp": "data_parallel_size=8 dp_size=8 dp_degree=8 data_parallel_replicate_degree=2",
    "degrees.tp": "tp_size=2 tensor_parallel_size=2 tensor_model_parallel_size=2 tensor_parallel_degree=2 tp_degree=2 "
    "model_parallel_size=2 autotp_size=2",
    "degrees.pp": "pp=2 pp_size=2 pipeline_parallel_size=2 pipeline_model_parallel_size=2 pipeline_parallel_degree=2 pp_degree=2 "
    "num_pipeline_stages=2",
    "degrees.ep": "ep_size=2 expert_parallel_size=2 expert_model_parallel_size=2 expert_parallel_degree=2 ep_degree=2",
    "degrees.etp": "expert_tensor_parallel_size=2 expert_tensor_parallel_degree=2",
    "degrees.sp": "sp_size=2 sequence_parallel_size=2 cp_size=2 cp=2 context_parallel=2 context_parallel_size=2 context_parallel_degree=2",
    "sharding.kind": "fsdp_sharding_strategy=FULL_SHARD sharding_strategy=FULL_SHARD",
    "pipeline.microbatches": "gradient_accumulation_steps=8 grad_accum_steps=8 accumulate_grad_batches=8 num_microbatches=8 "
    "num_micro_batches=8 "
    "grad_accum=8 accumulation_steps=8 accum_steps=8",
    "pipeline.schedule": "pipeline_parallel_schedule=1F1B pp_schedule=GPipe",
    "pipeline.chunks": "virtual_pipeline_model_parallel_size=2",
    "precision.compute": "mixed_precision=bf16 torch_dtype=bfloat16 dtype=float16 mixed_precision_param=bfloat16 params_dtype=float32 "
    "precision=bf16",
    "recompute.kind": "recompute_granularity=full activation_checkpoint.mode=selective",
    "data.text_key": "text_column=text text_column_name=text dataset_text_field=text json_keys=text text_field=text content_key=text",
    "data.tokenizer": "tokenizer_type=bpe",
    "data.packing": "sample_packing=true neat_packing=true eval_packing=true",
    "optimizer.lr": "learning_rate=3e-4 max_lr=6e-4 peak_lr=3e-4 base_lr=3e-4 lrate=1e-3 init_lr=1e-3 initial_lr=1e-3 lr_max=1e-3",
    "optimizer.kind": "optim=adamw_torch optimizer_type=Adam optimizer_name=AdamW optimizer.name=AdamW optimizer.type=Adam",
    "optimizer.beta1": "adam_beta1=0.9",
    "optimizer.beta2": "adam_beta2=0.95",
    "optimizer.eps": "adam_epsilon=1e-8 adam_eps=1e-8",
    "optimizer.weight_decay": "wd=0.1 l2=0.1",
    "optimizer.warmup_steps": "warmup_iters=20 lr_warmup_iters=20 lr_warmup_steps=20 num_warmup_steps=20 warmup_num_steps=20 warmup=20",
    "optimizer.schedule": "lr_scheduler_type=cosine lr_decay_style=WSD lr_scheduler=constant_with_warmup decay_type=linear "
    "scheduler.type=WarmupLR lr_schedule=cosine",
    "optimizer.min_lr_share": "min_lr_factor=0.1 min_lr_ratio=0.1",
    "optimizer.clip_norm": "max_grad_norm=1.0 grad_clip=1.0 clip_grad=1.0 gradient_clipping=1.0 gradient_clip_val=1.0 max_norm=1.0 "
    "clip=1.0 grad_norm_clip=1.0 grad_clip_norm=1.0",
    "lora.rank": "lora_r=8 lora_rank=8 peft_lora_r=8 r=8",
    "lora.alpha": "lora_alpha=16",
    "train.epochs": "num_train_epochs=3 num_epochs=3 max_epochs=3 train_epochs=3",
    "train.steps": "max_steps=500 max_iters=600 train_iters=500 num_train_steps=500 total_steps=500 training_steps=500 num_steps=500 "
    "total_num_steps=500 max_train_steps=500 "
    "iters=500 iterations=500 num_iterations=500 step=500",
    "train.global_batch": "batch_size=32 global_batch_size=32 train_batch_size=32 bs=32 batch=32 bsz=32 gbs=32",
    "train.eval_every": "eval_steps=500 eval_interval=500 eval_freq=500 val_check_interval=500 validation.freq=500 "
    "validate_every=500 eval_every_n_steps=500",
    "train.eval_sequences": "max_eval_samples=64 eval_samples=64 num_eval_samples=64",
    "train.save_every": "save_steps=500 save_interval=500 checkpoint_interval=500 checkpointing_steps=500 save_freq=500 "
    "checkpoint.interval=500 "
    "checkpoint_every=500 ckpt_interval=500 save_every_n_steps=500",
    "train.keep": "save_total_limit=2 keep_latest_k=2 keep_last=2 max_checkpoints=2",
    "train.save_mode": "async_mode=async",
    "train.seed": "random_seed=1 global_seed=1 data_seed=1 rng_seed=1 manual_seed=1",
    "train.compile": "torch_compile=true use_compile=true compile.enable=true",
    "train.deterministic": "deterministic_mode=true full_determinism=true",
    "train.timeout_s": "ddp_timeout=1800 train_timeout_seconds=100 init_timeout_seconds=300 distributed_timeout_seconds=600",
    "train.trackers": "report_to=wandb tracker=wandb",
}
# KEY=VALUE -> switches of other tools that mean this setting if they are on
SWITCHES: dict[str, str] = {
    "precision.compute=bf16": "bf16 bf16.enabled use_bf16 bfloat16 bf16_full_eval pure_bf16",
    "precision.compute=fp16": "fp16 fp16.enabled use_fp16 use_amp amp amp.enabled fp16_full_eval half half_precision",
    "precision.compute=fp32": "fp32 no_mixed_precision",
    "model.ffn=swiglu": "swiglu use_swiglu",
    "model.ffn=geglu": "geglu",
    "model.tied_embeddings=false": "untie_embeddings_and_output_weights",
    "model.positions=rotary": "use_rotary_position_embeddings use_rope",
    "model.positions=t5": "relative_attention_num_buckets",
    "model.document_mask=true": "reset_attention_mask reset_position_ids",
    "model.qk_norm=heads": "use_qk_norm qk_layernorm",
    "model.num_kv_heads=1": "multi_query multi_query_attention",
    "experts.residual=true": "use_residual",
    "router.gates=before_drop": "norm_topk_prob",
    "router.bias_rate=0.001": "moe_router_enable_expert_bias use_expert_bias",
    "router.softmax_over=all": "moe_router_pre_softmax",
    "dispatch.kind=padded": "moe_pad_expert_input_to_capacity",
    "tensor.overlap_chunks=2": "tp_comm_overlap enable_async_tensor_parallel",
    "sharding.kind=zero": "deepspeed deepspeed_config use_deepspeed",
    "sharding.kind=zero sharding.stage=1": "use_distributed_optimizer zero_redundancy_optimizer",
    "sharding.kind=fsdp": "fsdp use_fsdp use_torch_fsdp2 fully_shard fsdp_config fsdp_version",
    "sharding.kind=ddp": "use_ddp",
    "sharding.kind=zero sharding.stage=2 sharding.offload.optimizer=cpu": "cpu_offload enable_cpu_offload optimizer_cpu_offload",
    "sharding.kind=zero sharding.stage=3 sharding.offload.optimizer=cpu sharding.offload.parameters=cpu": "fsdp_offload_params",
    "recompute.kind=full": "gradient_checkpointing activation_checkpointing use_gradient_checkpointing checkpoint_activations "
    "gradient_checkpointing_kwargs partition_activations recompute_method "
    "remat activation_recompute",
    "recompute.kind=selective": "recompute_activations selective_ac_option recompute_modules moe_layer_recompute",
    "optimizer.schedule=cosine": "decay_lr",
    "lora.rank=8": "use_peft use_lora",
    "train.compile=true": "torch_compile_backend torch_compile_mode dynamo_backend dynamo_mode",
    "train.save_mode=async": "async_save use_async_checkpoint",
    "train.trackers=wandb": "enable_wandb wandb_log use_wandb with_tracking wandb_project wandb_run_name wandb",
}
# several settings -> names in other tools; each name sets all of them, and its value replaces {}
WITH_OTHERS: dict[str, str] = {
    "sharding.kind=zero sharding.stage={}": "zero_stage=3 zero_optimization.stage=2 ds_zero_stage=1",
    "sharding.kind=fsdp degrees.dp={}": "data_parallel_shard_degree=8 dp_shard=8",
    "sharding.kind=fsdp sharding.reshard={}": "fsdp_reshard_after_forward=always reshard_after_forward=true",
    "sharding.kind=zero sharding.stage=3 sharding.offload.optimizer={}": "offload_optimizer_device=cpu offload_optimizer.device=cpu "
    "zero_optimization.offload_optimizer.device=cpu",
    "sharding.kind=zero sharding.stage=3 sharding.offload.parameters={}": "offload_param_device=cpu offload_param.device=cpu "
    "zero_optimization.offload_param.device=cpu",
    "data.source=text data.path={}": "data_path=corpus.txt dataset=corpus.txt dataset_path=corpus.txt dataset_name=corpus.txt "
    "train_file=corpus.txt train_data_path=corpus.txt data_dir=corpus.txt train_data=corpus.txt data=corpus.txt train_path=corpus.txt "
    "train_dataset=corpus.txt data_file=corpus.txt data_files=corpus.txt "
    "dataset_dir=texts corpus=a.txt text_file=a.txt input_file=a.txt train_data_file=a.txt",
    "experts.shared=1 experts.shared_d_ff={}": "shared_expert_intermediate_size=512 moe_shared_expert_intermediate_size=512",
    "router.select=group_limited router.expert_groups={}": "n_group=8 n_expert_groups=8 moe_router_num_groups=8",
    "router.select=group_limited router.top_groups={}": "topk_group=4 n_limited_groups=4 moe_router_group_topk=4",
    "model.rope.scaling=linear model.rope.factor={}": "rope_scaling_factor=8",
    "optimizer.schedule=wsd optimizer.decay_share={}": "decay_ratio=0.2",
}
# key and its unit in words -> names in other tools whose values are in another unit, so that the user must convert them
OTHER_UNITS: dict[str, str] = {
    "train.global_batch, of all ranks and micro-batches together": "per_device_train_batch_size micro_batch_size local_batch_size "
    "train_micro_batch_size_per_gpu per_gpu_train_batch_size device_batch_size micro_batch "
    "mbs",
    "train.steps, in steps of train.global_batch sequences": "train_samples max_train_samples max_samples exit_interval",
    "train.global_batch, in sequences": "total_batch_size tokens_per_batch",
    "train.steps, the length of the learning rate's schedule": "lr_decay_iters lr_decay_steps",
    "train.eval_sequences, in sequences": "eval_iters eval_batch_size per_device_eval_batch_size validation.steps limit_val_batches "
    "eval_accumulation_steps",
    "train.eval_every, in steps": "eval_strategy evaluation_strategy evals_per_epoch",
    "train.save_every, in steps": "save_strategy always_save_checkpoint saves_per_epoch",
    "train.timeout_s, in seconds": "distributed_timeout_minutes",
    "optimizer.warmup_steps, in steps": "warmup_ratio lr_warmup_fraction lr_warmup_samples",
    "optimizer.min_lr_share, as a share of optimizer.lr": "min_lr lr_min final_lr",
    "model.init_scale, which is variance times fan_in": "init_method_std initializer_range init_std",
    "model.moe_layers, the indices of the layers with experts": "first_k_dense_replace mlp_only_layers num_sparse_encoder_layers "
    "num_sparse_decoder_layers",
    "model.num_layers, of encoder and decoder together": "num_decoder_layers decoder_layers decoder_num_layers",
    "model.encoder_layers, with model.kind encoder_decoder": "num_encoder_layers encoder_num_layers",
    "model.max_length, the number of tokens that the encoder reads": "encoder_seq_length",
    "model.d_ff, in hidden units": "mlp_ratio ffn_multiplier ffn_dim_multiplier expansion_factor",
    "model.num_kv_heads, the number of heads of keys and values": "group_query_attention use_gqa",
    "model.sliding_window, in tokens": "use_sliding_window",
    "model.sliding_layers, the indices of the layers with the window": "max_window_layers layer_types sliding_window_pattern",
    "experts.num_experts, of all ranks together": "num_experts_per_device moe_num_experts_per_device",
    "router.capacity_factor, slots of an expert / its mean load, null for dropless": "expert_capacity drop_tokens moe_drop_tokens",
    "router.balance_weight, the weight of the balance loss, or router.select sinkhorn": "moe_router_load_balancing_type",
    "router.noise, one of none, gumbel, noisy_top_k, or router.jitter": "noisy_gate_policy",
    "degrees.ep, in ranks": "enable_expert_parallel moe_expert_model_parallelism",
    "degrees.etp, ranks that share an expert's matrices": "moe_extended_tp",
    "recompute.every, with recompute.kind full": "recompute_num_layers",
    "precision.loss_scale, dynamic or a number": "initial_scale_power loss_scale_window initial_loss_scale hysteresis min_loss_scale",
    "optimizer.beta1, with optimizer.beta2": "betas adam_betas",
    "optimizer.decay_share, as a share of train.steps": "lr_wsd_decay_iters num_decay_steps",
    "model.rope.scaling, with model.rope.factor": "rope_scaling rope_parameters use_rope_scaling",
    "pipeline.chunks, stages a rank": "num_layers_per_virtual_pipeline_stage pipeline_parallel_layers_per_stage",
    "pipeline.microbatches, the number of micro-batches": "pipeline_parallel_microbatch_size microbatch_size",
    "pipeline.layers, the number of layers of each stage": "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
    "pipeline_model_parallel_layout",
    "data.validation_share, as a share of the text": "validation_split_percentage split val_size validation_file val_path val_data_path "
    "val_set_size valid_data_path eval_dataset",
    "data.tokenizer, one of bytes, bpe, ids or a tokenizer.json; --init_from brings a model's own": "tokenizer_name tokenizer_path "
    "tokenizer_name_or_path tokenizer_model vocab_file merge_file merges_file tokenizer_file",
    "lora.rank, 0 for no LoRA": "peft_type finetuning_type adapter",
    "data.chat_template, a Jinja file": "chat_template_path template chat_template_jinja",
    "lora.targets, of attention, experts, dense": "lora_target_modules target_modules lora_target_linear lora_target",
    "train.freeze, a list of embedding, head, attention, dense, experts, router, norms, layers.N-M": "freeze_router freeze_moe_router "
    "freeze_layers freeze_modules frozen_layers freeze_embeddings moe_router_freeze freeze_trainable_layers unfrozen_parameters",
}
# flag of a `moe` verb -> its names in other tools
FLAGS: dict[str, str] = {
    "--out": "output_dir=runs/a out_dir=runs/a save=runs/a save_dir=runs/a run_dir=runs/a dump_folder=runs/a checkpoint.folder=runs/a "
    "checkpoint_dir=runs/a run_name=first exp_name=first experiment_name=first name=first output=runs/a outdir=runs/a "
    "workdir=runs/a work_dir=runs/a exp_dir=runs/a",
    "--nproc": "nproc_per_node=2 num_processes=2 num_gpus=2 gpus=2 ngpu=2 devices=2 num_gpus_per_node=2 world_size=2 np=2 n_gpus=2 "
    "num_devices=2 procs=2 processes=2 ranks=2",
    "--world": "world_size=8 nproc=8 num_processes=8 gpus=8 num_gpus=8",
    "--init_from": "model_name_or_path=runs/a pretrained_model_name_or_path=runs/a pretrained=runs/a initial_load_path=runs/a "
    "pretrained_checkpoint=runs/a ckpt=runs/a ckpt_path=runs/a checkpoint=runs/a pretrained_path=runs/a load_path=runs/a "
    "load_from=runs/a pretrained_model=runs/a base_model=runs/a",
    "--from_step": "load_step=100 ckpt_step=100",
    "--restarts": "max_restarts=3",
    "--profile": "enable_profiling use_profiler wall_clock_breakdown flops_profiler.enabled use_pytorch_profiler",
    "--tokens": "max_new_tokens=50 max_tokens=50 out_seq_length=50",
    "--samples": "num_return_sequences=2 num_samples=2 n_samples=2",
    "--prompt_file": "file=a.txt input_file=a.txt prompts=a.txt",
    "--temperature": "temp=0.7",
    "--sequences": "num_samples=8 max_samples=8 max_eval_samples=8 eval_iters=8",
    "--microbatches": "num_microbatches=8 micro_batches=8",
    "--stages": "pp=4 pp_size=4 pp_degree=4 pipeline_parallel_size=4 num_stages=4",
    "--dtype": "torch_dtype=bf16",
    "--to": "target=glam_tiny recipe=glam_tiny",
    "--dry_run": "dry",
    "--prompt": "start=text text=text input=text message=text",
}
# flags in FLAGS that moe train does not have -> a verb of moe that has them
VERB_OF = dict.fromkeys(("--tokens", "--samples", "--prompt", "--prompt_file", "--temperature"), "generate") | {
    "--world": "rehearse", "--sequences": "eval", "--microbatches": "simulate", "--stages": "simulate",
    "--dtype": "convert", "--to": "convert"
}  # fmt: skip
# flags of moe train that users write into a recipe by mistake
OWN_FLAGS = ("nproc", "out", "launcher", "hostfile", "restarts", "cluster", "profile", "init_from", "from_step")
# reason why no key is needed -> names in other tools that need no recipe key
NEEDLESS: dict[str, str] = {
    "moe train continues from the newest checkpoint of its run folder; --out names another folder": "resume resume_from_checkpoint "
    "auto_resume resume_from restart load load_checkpoint checkpoint.enable enable_checkpoint continue_from",
    "checkpoints of the run folder are kept; a new --out begins another run": "overwrite_output_dir overwrite from_scratch clean",
    "moe train trains and evaluates; moe eval evaluates alone": "do_train do_eval do_predict eval_only",
    "each step is one line of metrics.jsonl and of TensorBoard's file": "logging_steps log_interval log_every log_freq logging_dir "
    "metrics.log_freq logging_strategy logging_first_step log_level steps_per_print include_tokens_per_second log_throughput "
    "timing_log_level tensorboard_dir enable_tensorboard disable_tqdm",
    "a GPU is used if there is one": "device backend cpu use_cpu no_cuda use_cuda accelerator",
    "a recipe's name or file follows the verb: moe train RECIPE": "config config_file config_name job.config_file model_type model_name",
    "several machines are named in a file, --hostfile FILE, with one line `host slots=N` each": "nnodes num_nodes nodes num_machines",
    "the fastest kernels of the device are chosen": "use_flash_attn attn_implementation use_flash_attention moe_grouped_gemm "
    "moe_permute_fusion no_masked_softmax_fusion bias_swiglu_fusion bias_gelu_fusion no_rope_fusion use_liger_kernel transformer_impl "
    "attention_backend",
    "gradients are summed during the backward pass": "overlap_comm overlap_grad_reduce overlap_param_gather contiguous_gradients "
    "reduce_bucket_size allgather_bucket_size ddp_bucket_cap_mb ddp_find_unused_parameters",
    "routers, softmax and sums of gradients are in fp32": "moe_router_dtype attention_softmax_in_fp32 "
    "accumulate_allreduce_grads_in_fp32 mixed_precision_reduce",
    "the launcher gives each rank its number and the address of rank 0": "local_rank node_rank machine_rank master_addr master_port "
    "main_process_ip main_process_port rdzv_endpoint rdzv_backend ddp_backend",
    "token ids are read from a memory-mapped file, packed into full sequences": "dataloader_num_workers num_workers dataloader_pin_memory "
    "dataloader_drop_last group_by_length",
    "--init_from takes weights alone, without the optimizer's states": "no_load_optim no_load_rng finetune load_model_only reset_optimizer",
    "moe generate draws tokens; --temperature 0 takes the likeliest": "do_sample",
    "with data.source chat only the assistant's messages are predicted": "assistant_only_loss completion_only_loss train_on_inputs "
    "train_on_prompt",
    "adapters are plain LoRA": "use_dora use_rslora lora_dropout lora_bias init_lora_weights",
    "moe report RUN draws the curves": "plot_loss",
    "moe convert RUN hf:FOLDER writes the folder for a hub": "push_to_hub hub_model_id",
}
# key -> {value in other tools, in lower case: value in a recipe}
WORDS: dict[str, dict[str, str]] = {
    "precision.compute": dict.fromkeys(("bfloat16", "bf16-mixed", "torch.bfloat16", "mixed_bf16"), "bf16")
    | dict.fromkeys(("float16", "half", "16-mixed", "torch.float16", "16"), "fp16")
    | dict.fromkeys(("float32", "float", "full", "torch.float32", "32", "no", "32-true", "false"), "fp32"),
    "precision.master": {"float32": "fp32", "float": "fp32", "bfloat16": "bf16"},
    "precision.loss_scale": {"0": "dynamic", "auto": "dynamic"},
    "model.ffn": dict.fromkeys(("silu", "swish", "swiglu_gate", "gated-silu"), "swiglu")
    | dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu"), "gelu")
    | {"gated-gelu": "geglu"},
    "model.norm": {"rms_norm": "rmsnorm", "layer_norm": "layernorm", "rms": "rmsnorm"},
    "model.positions": {"rope": "rotary", "relative": "t5", "yarn": "rotary"},
    "optimizer.kind": dict.fromkeys(
        ("adam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "fused_adam", "fusedadam", "adamw_bnb_8bit"), "adamw"
    ),
    "optimizer.schedule": dict.fromkeys(("warmup_stable_decay", "trapezoidal"), "wsd")
    | {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine", "warmupcosinelr": "cosine", "warmupdecaylr": "linear"}
    | {"inverse-square-root": "inverse_sqrt", "warmuplr": "constant"},
    "sharding.kind": {
        "fsdp2": "fsdp",
        "fully_shard": "fsdp",
        "full_shard": "fsdp",
        "deepspeed": "zero",
        "hsdp": "fsdp",
        "shard_grad_op": "fsdp",
        "hybrid_shard": "fsdp",
        "no_shard": "ddp",
    },
    "recompute.kind": {"true": "full", "block": "full", "uniform": "full", "op": "selective", "false": "none"},
    "pipeline.schedule": {"interleaved1f1b": "interleaved", "zbvzerobubble": "zb_v", "zbv": "zb_v"}
    | {"dualpipev": "dualpipe_v", "loopedbfs": "looped_bfs"},
    "router.drop": {"probs": "lowest_gate"},
    "router.score": {"sqrtsoftplus": "sqrt_softplus"},
    "router.select": {"topk": "top_k", "greedy": "top_k", "group_limited_greedy": "group_limited", "noaux_tc": "group_limited"},
    "dispatch.kind": {"alltoall": "all_to_all", "allgather": "all_gather"},
    "lora.targets": dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"), "attention")
    | dict.fromkeys(("gate_proj", "up_proj", "down_proj", "gate_up_proj"), "experts"),
    "data.tokenizer": {"gpt2bpetokenizer": "bpe", "byte": "bytes", "char": "bytes", "huggingfacetokenizer": "bpe"},
    "data.source": dict.fromkeys(("files", "file", "folder", "directory", "dir", "txt", "raw", "plain"), "text")
    | dict.fromkeys(("json", "jsonlines", "ndjson", "json_lines"), "jsonl")
    | dict.fromkeys(("chats", "messages", "conversations", "sharegpt", "chatml", "openai", "sft"), "chat"),
    "degrees.dp": {"-1": "auto"},
    "sharding.reshard": {"always": "true", "default": "true"},
    "train.trackers": {"tensorboard": "[]", "none": "[]", "all": "[]"},
    "train.save_mode": {"disabled": "sync", "async_with_pinned_mem": "async"},
}
