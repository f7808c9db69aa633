"""Names and categories that were seen in real traces, one by one."""

from __future__ import annotations

import pytest

from course_lib.trace import classify

COMMUNICATION = {
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)": "all-reduce",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": "all-reduce",
    "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "broadcast",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)": "send/recv",
    "ncclKernel_AllReduce": "all-reduce",
    "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevComm*, unsigned long, ncclWork*)": "all-reduce",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)": "all-reduce",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce-scatter",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all-gather",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "send/recv",
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)": "unknown collective",
    "ncclSymkDevKernel_AllReduce_AGxLL_R_sum_bf16(ncclSymkDevWorkArgs4K)": "all-reduce",
    "rcclGenericKernel": "unknown collective",
    "hcom_allReduce_": "all-reduce",
    "void deep_ep::internode::dispatch<false, 8, true, 4>(HybridEpArgs)": "dispatch",
    "void deep_ep::internode::combine<false, __nv_bfloat16, 8>(int4*, float*)": "combine",
    "void deep_ep::internode::notify_dispatch<false, 8>(int const*, int*)": "dispatch",
    "void deep_ep::intranode::dispatch<8, 768>(int4*, float*, int*)": "dispatch",
    "void deep_ep::intranode::cached_notify_combine<8>(void**, int*)": "combine",
    "void deep_ep::internode_ll::dispatch<true, false, 7168>(void*, void*)": "dispatch",
    "void multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)": "all-reduce",
    "void c10d::symmetric_memory::multimem_one_shot_all_reduce_kernel<float, 16>(float*)": "all-reduce",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)": "all-reduce",
    "void aiter::cross_device_reduce_2stage<__hip_bfloat16, 8>(aiter::RankData*)": "all-reduce",
    "void one_shot_all_reduce_kernel<float>(float**, float*)": "all-reduce",
    "two_shot_all_reduce_kernel_inplace": "all-reduce",
    "nvshmemi_barrier_threadgroup_kernel": "barrier",
    "void msccl::executor<float>(float*)": "unknown collective",
    "void hybrid_ep::dispatch_kernel<float, 4>(float*)": "dispatch",
    "mori::moe::EpDispatchIntraNodeKernel_bf16": "dispatch",
    "mori::moe::EpCombineInterNodeKernel_bf16": "combine",
}
COMPUTE = (
    "ampere_sgemm_128x64_tn",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::sum_functor<float> > >(float)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, at::Array<char*, 3> >",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>(int)",
    "void splitKreduce_kernel<32, 16, int, float, float, float, float, false>(cublasSplitKParams<float>)",
    "cask_cudnn::computeOffsetsKernel(cask_cudnn::ComputeOffsetsParams)",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<unsigned int, 1, 128, 1>(unsigned int*)",
    "Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT64x32x64",
    "triton_poi_fused_all_gather_into_tensor_wait_tensor_0",
    "void fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>(float)",
    "void permute_dispatch_tokens_kernel<float>(float*)",
    "void small_reduce_kernel<float>(float*)",
)


@pytest.mark.parametrize(("name", "kind"), COMMUNICATION.items())
def test_communication_by_its_name(name: str, kind: str) -> None:
    assert classify.device_kind("kernel", name) == "comm"
    assert classify.collective(name) == kind


@pytest.mark.parametrize("name", COMPUTE)
def test_compute_stays_compute(name: str) -> None:
    assert classify.device_kind("kernel", name) == "compute"


@pytest.mark.parametrize(("cat", "kind"), [
    ("kernel", "kernel"), ("Kernel", "kernel"), ("gpu_memcpy", "copy"), ("Memcpy", "copy"), ("gpu_memset", "memset"),
    ("Memset", "memset"), ("cuda_runtime", "runtime"), ("Runtime", "runtime"), ("cuda_driver", "runtime"),
    ("cpu_op", "operator"), ("Operator", "operator"), ("user_annotation", "annotation"), ("overhead", "overhead")])
def test_categories_of_all_schemas(cat: str, kind: str) -> None:
    assert classify.category(cat) == kind


@pytest.mark.parametrize("cat", ["gpu_user_annotation", "cuda_sync", "python_function", "Trace", "ac2g", "fwdbwd",
                                 "async_cpu_to_gpu", "cpu_instant_event", ""])
def test_what_is_never_work(cat: str) -> None:
    assert classify.category(cat) == ""


@pytest.mark.parametrize(("name", "number"), [("ProfilerStep#12", 12), ("ProfilerStep*3", 3), ("course::step 0", 0),
                                              ("Optimizer.step#SGD.step", None), ("## forward ##", None)])
def test_step_markers(name: str, number: int | None) -> None:
    assert classify.step_number(name) == number


def test_our_own_wire() -> None:
    assert classify.wire_transfer("wire::all_reduce bytes=4096 bucket=3") == ("all_reduce", 4096, 3)
    assert classify.wire_transfer("wire::all_reduce bytes=4096") == ("all_reduce", 4096, -1)
    assert classify.wire_transfer("gloo:all_reduce") is None


@pytest.mark.parametrize(("name", "moves"), [("gloo:all_reduce", True), ("mpi:send", True), ("nccl:all_reduce", False),
                                             ("c10d::allreduce_", False), ("aten::all", False)])
def test_host_spans_that_move_bytes(name: str, moves: bool) -> None:
    assert classify.host_communication(name) is moves


@pytest.mark.parametrize(("name", "starts"), [
    ("cudaLaunchKernel", True), ("cudaLaunchKernelExC", True), ("cuLaunchKernelEx", True), ("hipLaunchKernel", True),
    ("hipExtModuleLaunchKernel", True), ("hipExtLaunchKernel", True), ("cudaMemcpyAsync", False),
    ("cudaStreamWaitEvent", False)])
def test_runtime_calls_that_start_kernels(name: str, starts: bool) -> None:
    assert classify.launches(name) is starts
