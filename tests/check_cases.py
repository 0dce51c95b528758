"""For every rule that the values of a config alone break: overrides that break it, and the first key to change."""

from __future__ import annotations

VLLM = ["rollout=vllm", "model.dtype=float32"]
SERVER = ["rollout=vllm_server", "model.dtype=float32"]
JSONL = ["data=jsonl", "data.train=train.jsonl"]
FORCE = ["loss.force_on_policy_ratio=true", "loss.clip_low=null", "loss.clip_high=null"]
LORA = ["model.lora={rank:16,alpha:32.0,dropout:0.0,target_modules:[q_proj]}", "trainer.lr=2e-5"]
TRUNCATE = [*VLLM, "rollout.dtype=bfloat16", "loss.correction.mode=truncate", "loss.correction.high=2.0"]
CARRY = ["filter=dynamic_sampling", "filter.surplus=carry"]
KL_IN_REWARD = ["advantage=reinforce_pp_baseline", "loss.use_kl_in_reward=true", "loss.kl_estimator=k1"]
TWO_UPDATES = ["trainer.updates_per_step=2"]


def overlong(max_tokens: int = 256, buffer_tokens: int = 64, penalty: float = 1.0) -> str:
    values = f"max_tokens:{max_tokens},buffer_tokens:{buffer_tokens},penalty:{penalty}"
    return "reward.overlong={" + values + "}"


CASES: dict[str, tuple[list[str], str]] = {
    # Shape
    "key_known": (["++trainer.lrr=1e-5"], "trainer.lrr"),
    "value_given": (["data=jsonl"], "data.train"),
    "value_type": (["trainer.lr=abc"], "trainer.lr"),
    "choice_known": (["loss.aggregation=token_meen"], "loss.aggregation"),
    "numbers_finite": (["trainer.weight_decay=nan"], "trainer.weight_decay"),
    "counts_in_range": (["trainer.steps=0"], "trainer.steps"),
    # Batch arithmetic
    "group_advantage_needs_two_generations": (
        ["rollout.num_generations=1", "filter=none"],
        "rollout.num_generations",
    ),
    "group_filter_needs_two_generations": (
        ["rollout.num_generations=1", "advantage=reinforce_pp"],
        "filter.name",
    ),
    "updates_have_sequences": (
        ["trainer.prompts_per_step=1", "rollout.num_generations=2", "trainer.updates_per_step=4"],
        "trainer.updates_per_step",
    ),
    "sequences_divide_into_updates": (["trainer.updates_per_step=3"], "trainer.updates_per_step"),
    "sequences_divide_over_processes": (
        ["trainer.prompts_per_step=3", "rollout.num_generations=3", "trainer.nproc_per_node=2"],
        "trainer.prompts_per_step",
    ),
    "update_feeds_every_process": (
        ["trainer.updates_per_step=32", "trainer.nproc_per_node=4"],
        "trainer.updates_per_step",
    ),
    "micro_batch_fits_longest_sequence": (["trainer.micro_batch_tokens=200"], "trainer.micro_batch_tokens"),
    "shared_prefix_fits_two_completions": (
        ["trainer.packing=shared_prefix", "trainer.micro_batch_tokens=400"],
        "trainer.micro_batch_tokens",
    ),
    "run_length_given": (["trainer.steps=null"], "trainer.steps"),
    "run_length_given_once": (["trainer.epochs=1"], "trainer.epochs"),
    "warmup_shorter_than_run": (["trainer.warmup_steps=100"], "trainer.warmup_steps"),
    "decay_needs_known_length": (
        ["trainer.steps=null", "trainer.epochs=2", "trainer.lr_schedule=cosine", "filter=dynamic_sampling"],
        "trainer.steps",
    ),
    # Rollout and sampling
    "temperature_positive": (["rollout.temperature=0"], "rollout.temperature"),
    "temperature_explores": (["rollout.temperature=0.01"], "rollout.temperature"),
    "sampling_filters_in_range": (["rollout.top_p=1.5"], "rollout.top_p"),
    "training_samples_full_support": (["rollout.top_k=20"], "rollout.top_k"),
    "corrected_sampling_needs_full_support": (
        ["rollout.min_p=0.1", "loss.seq_logprob_error_threshold=2.0"],
        "rollout.min_p",
    ),
    "sequence_fits_context": (["rollout.max_model_len=300"], "rollout.max_model_len"),
    "stop_strings_not_empty": (["rollout.stop=['', \"a b\"]"], "rollout.stop"),
    "mask_truncated_needs_room": (
        ["loss.mask_truncated=true", "rollout.max_new_tokens=32"],
        "rollout.max_new_tokens",
    ),
    "hf_rollout_shares_model_dtype": (["model.dtype=bfloat16", "rollout.dtype=float32"], "rollout.dtype"),
    "engine_dtype_matches_model": ([*VLLM, "rollout.dtype=bfloat16"], "rollout.dtype"),
    "hf_rollout_avoids_zero3": (["trainer.zero_stage=3", "trainer.nproc_per_node=2"], "trainer.zero_stage"),
    # Filter
    "filter_metric_known": (["filter.metric=numbr"], "filter.metric"),
    "filter_on_unshaped_reward": (["filter.metric=total", overlong()], "filter.metric"),
    "dynamic_sampling_needs_max_rounds": (
        ["filter=dynamic_sampling", "filter.max_rounds=null"],
        "filter.max_rounds",
    ),
    "dynamic_sampling_needs_a_second_round": (
        ["filter=dynamic_sampling", "filter.max_rounds=1"],
        "filter.max_rounds",
    ),
    "max_rounds_needs_dynamic_sampling": (["filter.max_rounds=4"], "filter.name"),
    "surplus_carry_excludes_force_on_policy": ([*CARRY, *FORCE], "filter.surplus"),
    "surplus_carry_needs_correction": (CARRY, "filter.surplus"),
    "reward_range_needs_a_bound": (["filter=reward_range", "filter.low=null", "filter.high=null"], "filter.low"),
    "reward_range_low_below_high": (["filter=reward_range", "filter.low=0.9"], "filter.low"),
    "range_bounds_need_reward_range": (["filter.low=0.1"], "filter.name"),
    "empty_steps_need_a_limit": (["filter.max_empty_steps=null"], "filter.max_empty_steps"),
    "group_filter_needs_group_advantage": (["advantage=reinforce_pp"], "filter.name"),
    # Advantage
    "leave_one_out_needs_grpo": (["advantage=opo", "advantage.leave_one_out=true"], "advantage.leave_one_out"),
    "normalized_leave_one_out_needs_three_generations": (
        ["advantage.leave_one_out=true", "rollout.num_generations=2"],
        "rollout.num_generations",
    ),
    "dr_grpo_needs_normalize_none": (["advantage=dr_grpo", "advantage.normalize=batch"], "advantage.normalize"),
    "dr_grpo_loss_needs_normalize_none": (["loss=dr_grpo"], "advantage.name"),
    "normalize_needs_grpo": (["advantage=rloo", "advantage.normalize=group"], "advantage.normalize"),
    "advantage_eps_positive": (["advantage.eps=0"], "advantage.eps"),
    "advantage_clip_positive": (["advantage.clip=-1"], "advantage.clip"),
    "gdpo_needs_two_terms": (["advantage=gdpo"], "advantage.name"),
    "maxrl_needs_non_negative_rewards": (["advantage=maxrl", overlong()], "reward.overlong"),
    # Loss, ratio and clip
    "force_on_policy_needs_one_update": ([*FORCE, *TWO_UPDATES], "trainer.updates_per_step"),
    "force_on_policy_needs_fresh_rollouts": (
        [*FORCE, *SERVER, "rollout.max_staleness=1", "loss.correction.mode=truncate", "loss.correction.high=2.0"],
        "rollout.max_staleness",
    ),
    "force_on_policy_excludes_ratio_losses": (
        ["loss=cispo", "loss.force_on_policy_ratio=true"],
        "loss.force_on_policy_ratio",
    ),
    "force_on_policy_excludes_dual_clip": ([*FORCE, "loss.dual_clip=3.0"], "loss.dual_clip"),
    "force_on_policy_ignores_clip": (["loss.force_on_policy_ratio=true"], "loss.clip_low"),
    "clip_range_needs_both_bounds": (["loss.clip_high=null"], "loss.clip_high"),
    "clip_not_negative": (["loss.clip_low=-0.2"], "loss.clip_low"),
    "clip_low_below_one": (["loss.clip_low=1.0"], "loss.clip_low"),
    "token_clip_not_sequence_sized": (["loss.clip_low=3e-4", "loss.clip_high=4e-4"], "loss.clip_low"),
    "dual_clip_above_one": (["loss.dual_clip=1.0"], "loss.dual_clip"),
    "dual_clip_above_clip_high": (["loss.dual_clip=1.1"], "loss.dual_clip"),
    "dual_clip_needs_ppo_clip": (["loss=sapo", *TWO_UPDATES, "loss.dual_clip=3.0"], "loss.dual_clip"),
    "clip_needs_a_clipped_loss": (["loss=reinforce", "loss.clip_high=0.2"], "loss.clip_high"),
    "sapo_taus_positive": (["loss=sapo", *TWO_UPDATES, "loss.tau_neg=0"], "loss.tau_neg"),
    "taus_need_sapo": (["loss.tau_pos=1.0"], "loss.tau_pos"),
    "gspo_needs_sequence_ratio": (["loss=gspo", *TWO_UPDATES, "loss.ratio_level=token"], "loss.ratio_level"),
    "sequence_ratio_needs_ppo_clip": (["loss=cispo", *TWO_UPDATES, "loss.ratio_level=sequence"], "loss.ratio_level"),
    "sequence_ratio_needs_sequence_aggregation": (
        ["loss=gspo", *TWO_UPDATES, "loss.aggregation=token_mean"],
        "loss.aggregation",
    ),
    "sequence_ratio_needs_narrow_clip": (["loss=gspo", *TWO_UPDATES, "loss.clip_high=0.2"], "loss.clip_low"),
    "cispo_needs_clip_high": (["loss=cispo", *TWO_UPDATES, "loss.clip_high=null"], "loss.clip_high"),
    "cispo_needs_no_lower_bound": (["loss=cispo", *TWO_UPDATES, "loss.clip_low=0.5"], "loss.clip_low"),
    "gmpo_needs_sequence_mean": (["loss=gmpo", *TWO_UPDATES, "loss.aggregation=token_mean"], "loss.aggregation"),
    "constant_aggregation_needs_length": (["loss.aggregation=constant"], "loss.constant_length"),
    "constant_length_needs_constant_aggregation": (["loss.constant_length=256"], "loss.constant_length"),
    "constant_length_near_max_new_tokens": (
        ["loss.aggregation=constant", "loss.constant_length=1025"],
        "loss.constant_length",
    ),
    "dr_grpo_loss_needs_constant_aggregation": (
        ["loss=dr_grpo", "advantage=dr_grpo", "loss.aggregation=token_mean", "loss.constant_length=null"],
        "loss.aggregation",
    ),
    "dapo_needs_token_mean": (["loss=dapo", "loss.aggregation=seq_mean_token_mean"], "loss.aggregation"),
    "dapo_needs_clip_higher": (["loss=dapo", "loss.clip_high=0.2"], "loss.clip_high"),
    "ratio_loss_needs_several_updates": (["loss=gspo"], "trainer.updates_per_step"),
    "reinforce_needs_one_update": (["loss=reinforce", *TWO_UPDATES], "trainer.updates_per_step"),
    "entropy_quantile_in_unit_interval": (["loss.top_entropy_quantile=0"], "loss.top_entropy_quantile"),
    "entropy_quantile_needs_token_ratio": (
        ["loss=gspo", *TWO_UPDATES, "loss.top_entropy_quantile=0.2"],
        "loss.top_entropy_quantile",
    ),
    # KL and logprob passes
    "kl_in_reward_needs_prev_logprobs": (
        [*KL_IN_REWARD, *FORCE, "loss.kl_coef=0.01"],
        "loss.force_on_policy_ratio",
    ),
    "kl_in_reward_needs_reinforce_pp": (
        ["loss.use_kl_in_reward=true", "loss.kl_coef=0.01", "loss.kl_estimator=k1"],
        "loss.use_kl_in_reward",
    ),
    "kl_in_reward_needs_kl_coef": (["loss.use_kl_in_reward=true"], "loss.use_kl_in_reward"),
    "kl_coef_not_negative": (["loss.kl_coef=-0.1"], "loss.kl_coef"),
    "kl_coef_below_one": (["loss.kl_coef=1"], "loss.kl_coef"),
    "loss_kl_needs_k2_or_k3": (["loss.kl_coef=0.01", "loss.kl_estimator=k1"], "loss.kl_estimator"),
    "reward_kl_needs_k1": ([*KL_IN_REWARD, "loss.kl_coef=0.01", "loss.kl_estimator=k3"], "loss.kl_estimator"),
    "dapo_needs_no_kl": (["loss=dapo", "loss.kl_coef=0.01"], "loss.kl_coef"),
    "force_on_policy_needs_no_error_threshold": (
        [*FORCE, "loss.seq_logprob_error_threshold=2.0"],
        "loss.seq_logprob_error_threshold",
    ),
    "error_threshold_at_least_one": (
        ["loss.seq_logprob_error_threshold=0.5"],
        "loss.seq_logprob_error_threshold",
    ),
    "error_threshold_above_noise": (
        ["loss.seq_logprob_error_threshold=1"],
        "loss.seq_logprob_error_threshold",
    ),
    # Rollout correction and off-policy
    "correction_needs_an_engine_gap": (
        ["loss.correction.mode=truncate", "loss.correction.high=2.0"],
        "loss.correction.mode",
    ),
    "correction_low_below_high": ([*TRUNCATE, "loss.correction.low=2.0"], "loss.correction.low"),
    "correction_bounds_around_one": ([*TRUNCATE, "loss.correction.high=0.5"], "loss.correction.high"),
    "truncate_needs_high": ([*TRUNCATE, "loss.correction.high=null"], "loss.correction.high"),
    "mask_needs_a_bound": (
        [*TRUNCATE, "loss.correction.mode=mask", "loss.correction.high=null"],
        "loss.correction.low",
    ),
    "correction_bounds_need_a_mode": (["loss.correction.high=2.0"], "loss.correction.mode"),
    "sequence_correction_needs_short_completions": (
        [*TRUNCATE, "loss.correction.level=sequence", "rollout.max_new_tokens=513"],
        "loss.correction.level",
    ),
    "geometric_correction_needs_tight_bounds": (
        [*TRUNCATE, "loss.correction.level=geometric", "loss.correction.high=2.1"],
        "loss.correction.low",
    ),
    "gmpo_needs_sequence_correction": ([*TRUNCATE, "loss=gmpo", *TWO_UPDATES], "loss.correction.level"),
    "sequence_ratio_needs_sequence_correction": ([*TRUNCATE, "loss=gspo", *TWO_UPDATES], "loss.correction.level"),
    "stale_rollouts_need_correction": ([*SERVER, "rollout.max_staleness=1"], "loss.correction.mode"),
    "stale_rollouts_need_an_engine": (
        ["rollout.max_staleness=1", "loss.correction.mode=truncate", "loss.correction.high=2.0"],
        "rollout.max_staleness",
    ),
    "stale_rollouts_need_own_devices": ([*TRUNCATE, "rollout.max_staleness=1"], "rollout.devices"),
    "stale_rollouts_exclude_dynamic_sampling": (
        [
            *SERVER,
            "rollout.max_staleness=1",
            "loss.correction.mode=truncate",
            "loss.correction.high=2.0",
            "filter=dynamic_sampling",
        ],
        "filter.name",
    ),
    "staleness_stays_small": (
        [*SERVER, "rollout.max_staleness=9", "loss.correction.mode=truncate", "loss.correction.high=2.0"],
        "rollout.max_staleness",
    ),
    # Reward
    "reward_terms_not_empty": (["reward.terms=[]"], "reward.terms"),
    "reward_term_known": (["reward.terms=[{name:exat,weight:1.0}]"], "reward.terms.0.name"),
    "reward_term_names_unique": (
        ["reward.terms=[{name:exact,weight:1.0},{name:number,weight:0.5},{name:exact,weight:2.0}]"],
        "reward.terms",
    ),
    "reward_weights_not_all_zero": (["reward.terms.0.weight=0"], "reward.terms"),
    "reward_needs_a_time_limit": (["reward.timeout_s=null"], "reward.timeout_s"),
    "overlong_buffer_within_max": ([overlong(buffer_tokens=300)], "reward.overlong.buffer_tokens"),
    "overlong_penalty_positive": ([overlong(penalty=0)], "reward.overlong.penalty"),
    "overlong_can_fire": ([overlong(max_tokens=400)], "reward.overlong.max_tokens"),
    "overlong_max_equals_max_new_tokens": ([overlong(max_tokens=200)], "reward.overlong.max_tokens"),
    "overlong_penalty_below_reward": ([overlong(penalty=1.5)], "reward.overlong.penalty"),
    "overlong_excludes_mask_truncated": ([overlong(), "loss.mask_truncated=true"], "loss.mask_truncated"),
    # Data
    "file_data_needs_train": ([*JSONL, "data.train=null"], "data.train"),
    "file_data_needs_prompt_key": ([*JSONL, "data.prompt_key=null"], "data.prompt_key"),
    "answer_reward_needs_answer_key": ([*JSONL, "data.answer_key=''"], "data.answer_key"),
    "eval_every_needs_eval_data": ([*JSONL, "trainer.eval_every=10"], "trainer.eval_every"),
    "eval_data_differs_from_train": ([*JSONL, "data.eval=train.jsonl"], "data.eval"),
    # Trainer and DeepSpeed
    "lr_positive": (["trainer.lr=0"], "trainer.lr"),
    "lr_plausible_for_full_training": (["trainer.lr=2e-4"], "trainer.lr"),
    "lr_large_enough_for_lora": ([*LORA, "trainer.lr=1e-6"], "trainer.lr"),
    "betas_in_unit_interval": (["trainer.betas=[0.9,1.0]"], "trainer.betas"),
    "weight_decay_not_negative": (["trainer.weight_decay=-0.1"], "trainer.weight_decay"),
    "max_grad_norm_positive": (["trainer.max_grad_norm=0"], "trainer.max_grad_norm"),
    "offload_optimizer_needs_zero1": (
        ["trainer.offload_optimizer=true", "trainer.zero_stage=0"],
        "trainer.zero_stage",
    ),
    "offload_param_needs_zero3": (["trainer.offload_param=true"], "trainer.zero_stage"),
    "zero3_needs_several_processes": (["trainer.zero_stage=3"], "trainer.zero_stage"),
    "resume_path_exists": (["trainer.resume=/nowhere/step_000020"], "trainer.resume"),
    "intervals_within_run": (["trainer.eval_every=101"], "trainer.eval_every"),
    "long_run_needs_checkpoints": (["trainer.save_every=null"], "trainer.save_every"),
    "keep_checkpoints_positive": (["trainer.keep_checkpoints=0"], "trainer.keep_checkpoints"),
    # Model and LoRA
    "model_path_given": (["model.path=null"], "model.path"),
    "flash_attention_needs_bfloat16": (
        ["model.attn_implementation=flash_attention_2", "model.dtype=float32"],
        "model.dtype",
    ),
    "shared_prefix_needs_mask_attention": (
        ["model.attn_implementation=flash_attention_2", "trainer.packing=shared_prefix"],
        "model.attn_implementation",
    ),
    "lora_values_in_range": ([*LORA, "model.lora.rank=0", "model.lora.target_modules=[]"], "model.lora.rank"),
    "lora_dropout_is_zero": ([*LORA, "model.lora.dropout=0.1"], "model.lora.dropout"),
    "revision_needs_hub_model": (["model.path=./here", "model.revision=main"], "model.revision"),
    # Engines and weight sync
    "hf_needs_in_process_sync": (["rollout.weight_sync=nccl"], "rollout.weight_sync"),
    "in_process_sync_needs_local_engine": ([*SERVER, "rollout.weight_sync=in_process"], "rollout.weight_sync"),
    "ipc_sync_needs_shared_devices": (
        [*SERVER, "rollout.weight_sync=ipc", "rollout.server_url=http://gpu7:8000"],
        "rollout.weight_sync",
    ),
    "nccl_sync_needs_separate_devices": ([*VLLM, "rollout.weight_sync=nccl"], "rollout.weight_sync"),
    "engine_devices_disjoint_from_trainer": (
        [*VLLM, "rollout.weight_sync=nccl", "rollout.devices=[0,1]"],
        "rollout.devices",
    ),
    "tensor_parallel_divides_devices": (
        [*VLLM, "rollout.weight_sync=nccl", "rollout.devices=[1,2,3]", "rollout.tensor_parallel_size=2"],
        "rollout.tensor_parallel_size",
    ),
    "memory_fraction_in_range": ([*VLLM, "rollout.gpu_memory_utilization=40"], "rollout.gpu_memory_utilization"),
    "colocated_engine_leaves_memory": (
        [*VLLM, "rollout.gpu_memory_utilization=0.9"],
        "rollout.gpu_memory_utilization",
    ),
    "sleep_needs_colocated_engine": (
        [*VLLM, "rollout.weight_sync=nccl", "rollout.devices=[1]", "rollout.sleep_level=1"],
        "rollout.sleep_level",
    ),
    "sleep_level_two_excludes_lora": ([*VLLM, *LORA, "rollout.sleep_level=2"], "rollout.sleep_level"),
    "server_url_valid": ([*SERVER, "rollout.server_url=gpu7:8000"], "rollout.server_url"),
    "sync_tolerance_positive": (["rollout.sync_tolerance=null"], "rollout.sync_tolerance"),
    "sync_tolerance_detects_stale_weights": (
        ["model.dtype=float32", "rollout.sync_tolerance=0.1"],
        "rollout.sync_tolerance",
    ),
    "sync_tolerance_above_bfloat16_noise": (
        ["rollout=vllm", "model.dtype=bfloat16", "rollout.sync_tolerance=0.001"],
        "rollout.sync_tolerance",
    ),
    # Logging and run directory
    "run_name_is_one_component": (["run.name=../up"], "run.name"),
    "wandb_online_needs_key": (["logger.wandb.mode=online"], "logger.wandb.mode"),
    # Security
    "trust_remote_code_off": (["model.path=./here", "model.trust_remote_code=true"], "model.trust_remote_code"),
    "remote_code_needs_pinned_revision": (
        ["model.path=org/name", "model.trust_remote_code=true"],
        "model.trust_remote_code",
    ),
    "python_reward_needs_opt_in": (["reward.terms=[{name:os.system,weight:1.0}]"], "reward.terms.0.name"),
    "python_reward_names_a_file": (
        ["reward=python", "reward.terms.0.path=os", "reward.terms.0.function=path.join"],
        "reward.terms.0.path",
    ),
    "no_callables_in_config": (["++model._target_=os.system"], "model._target_"),
    "dataset_script_refused": ([*JSONL, "data.train=load.py"], "data.train"),
    "no_credentials_in_urls": ([*SERVER, "rollout.server_url=http://me:word@gpu7:8000"], "rollout.server_url"),
    "remote_server_needs_https": ([*SERVER, "rollout.server_url=http://gpu7.example.org"], "rollout.server_url"),
    # Several nodes
    "own_server_on_one_node": ([*SERVER, "trainer.nnodes=2"], "rollout.server_url"),
    # Values that nothing reads
    "file_keys_need_file_data": (["data.train=train.jsonl"], "data.train"),
    "value_is_read": (["filter.surplus=carry"], "filter.surplus"),
}
