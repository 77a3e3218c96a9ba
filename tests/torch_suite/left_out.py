"""Torch's tests of the wrapper that are not run, each with its reason in one line, by kind of reason."""

from __future__ import annotations

# Nothing of them is left without the hardware: torch's own class cannot run them on CPU tensors either.
_NEED_A_GPU = {
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": "SyncBatchNorm is refused on CPU, as by torch",
    "test_DistributedDataParallel_SyncBatchNorm": "SyncBatchNorm is refused on CPU, as by torch",
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": "SyncBatchNorm is refused on CPU, as by torch",
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": "SyncBatchNorm is refused on CPU, as by torch",
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": "SyncBatchNorm is refused on CPU",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": "SyncBatchNorm is refused on CPU",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": "SyncBatchNorm is refused on CPU",
    "test_DistributedDataParallel_SyncBatchNorm_half": "SyncBatchNorm is refused on CPU, as by torch",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": "SyncBatchNorm is refused on CPU, as by torch",
    "test_ddp_inference": "half of it is SyncBatchNorm; the rest is in tests/ddp/test_like_torch_inputs.py",
    "test_ddp_sync_bn_training_vs_eval": "SyncBatchNorm is refused on CPU, as by torch",
    "test_sync_bn_logged": "SyncBatchNorm is refused on CPU, as by torch",
    "test_ddp_logging_data_gpu": "asserts device_ids in the logged data; the CPU twin is run",
    "test_ddp_device": "asserts that inputs arrive on the GPU; types of inputs are in test_like_torch_inputs.py",
    "test_ddp_profiling_execution_trace": "NCCL metadata in traces",
}

# They look into objects of torch's C++ reducer, or at attributes that only its implementation has.
_PRIVATE = {
    "test_ddp_native_mixed_precision_ignored_params": "asserts `_mp_param` and `_fp_param` on parameters",
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": "asserts `_mp_param`, `_fp_param`",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": "asserts `_mp_param`, `_fp_param`",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": "asserts `_mp_param`, `_fp_param`",
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": "asserts `_mp_param`, `_fp_param`",
    "test_ddp_profiling_autograd_profiler": "asserts that a graph walk for unused parameters is profiled; we need none",
    "test_ddp_profiling_torch_profiler": "asserts that a graph walk for unused parameters is profiled; we need none",
    "test_compute_bucket_assignment_by_size_sparse_error_without_logger": "tests torch's C++ bucket assignment alone",
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": "tests torch's C++ bucket assignment and logger",
    "test_verify_model_across_rank_without_logger": "tests torch's C++ comparison of shapes alone",
    "test_different_graph_across_ranks": "asserts that find_unused_parameters=True forbids rebuilding buckets",
}

# They assert an error for what is right here without a flag.
_ERROR_BECAME_BEHAVIOUR = {
    "test_ddp_unused_params_rebuild_buckets_exception": "unused parameters need no flag",
    "test_ddp_control_flow_same_across_ranks": "unused parameters need no flag; also reads `_get_local_used_map`",
    "test_ddp_control_flow_different_across_ranks": "unused parameters need no flag; also reads `_get_local_used_map`",
    "test_ddp_multiple_nested_unused_params_error": "unused parameters need no flag",
    "test_ddp_multiple_nested_unused_params_err_ignore_params": "unused parameters need no flag",
    "test_ddp_has_finalized": "an output that only some ranks use is reduced like any other",
    "test_invalid_static_graph": "both changes of a static graph raise in the step itself, not in the next forward",
}

# They do not pass with torch's own class in the same place.
_BROKEN_IN_TORCH = {
    "test_ddp_hook_pickling_powerSGD": "loads a PowerSGD state with torch.load's safe default, which refuses it",
}

LEFT_OUT: dict[str, str] = {**_NEED_A_GPU, **_PRIVATE, **_ERROR_BECAME_BEHAVIOUR, **_BROKEN_IN_TORCH}

# Tests that ask for more than the two ranks that all others run on.
RANKS: dict[str, int] = {
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd": 4,
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view": 4,
}

# Sizes meant for a GPU, which would take minutes: what the text of a test says, and what it is run with.
SMALLER: dict[str, tuple[str, str]] = {"test_ddp_uneven_inputs": ("dim = 1000", "dim = 20")}

# Of torch's tests of its own classes, what the backend "phalanx" cannot run in the place of gloo.
NOT_ON_PHALANX: dict[str, str] = {
    **dict.fromkeys(
        (
            "test_SyncBatchNorm_process_group",
            "test_all_to_all_group_cuda",
            "test_all_to_all_single_equal_split_group_cuda",
            "test_all_to_all_single_unequal_split_group_cuda",
            "test_average_parameters",
            "test_barrier_full_group_cuda",
            "test_barrier_group_cuda",
            "test_batch_isend_irecv_mixed_backend_err",
            "test_batch_isend_irecv_nccl",
            "test_batch_isend_irecv_no_rank_zero_nccl",
            "test_batch_isend_irecv_self_nccl",
            "test_ddp_apply_optim_in_backward",
            "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
            "test_ddp_apply_optim_in_backward_ignored_params",
            "test_monitored_barrier_allreduce_hang",
            "test_monitored_barrier_allreduce_hang_wait_all_ranks",
            "test_nccl_high_priority_stream",
        ),
        "needs a GPU, nccl or torchvision, on gloo too",
    ),
    **dict.fromkeys(
        ("test_barrier_timeout_arg", "test_barrier_timeout_full_group", "test_barrier_timeout_group"),
        "asserts the words of gloo's time limit; ours name the rank",
    ),
    **dict.fromkeys(
        (
            "test_monitored_barrier_failure_order",
            "test_monitored_barrier_gloo",
            "test_monitored_barrier_gloo_subgroup",
            "test_monitored_barrier_wait_all_ranks",
        ),
        "torch offers monitored_barrier for the backend of that name only, and says so",
    ),
    "test_barrier_timeout_global": "makes its own default group from a file that this bench does not have",
    "test_get_backend": "asserts that the backend is called gloo",
    "test_get_rank": "counts files that its runner makes",
}
