# ruff: noqa: E501 - logs are as long as they are
"""A realistic log for every entry of the knowledge: what the tool prints, with its surroundings."""

from __future__ import annotations

TB = 'Traceback (most recent call last):\n  File "/kaggle/working/train.py", line 212, in <module>\n    main()\n'
UW = "/usr/local/lib/python3.12/site-packages/"

LOGS = {
    # -- memory -----------------------------------------------------------------------------------
    "tpu-allocation-exceeds-memory": TB
    + "RuntimeError: Bad StatusOr access: INTERNAL: during context [pre-optimization]: Allocation (size=51539607552) would exceed memory (size=17179869184) :: #allocation7 [shape = 'u8[51539607552]{0}', space=hbm, size = 0xffffffffffffffff, tag = 'output of broadcast.3489@{}'] :: <no-hlo-instruction>",
    "tpu-oom-vmem": TB
    + "RuntimeError: Bad StatusOr access: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used 34.21M of 16.00M vmem. Exceeded vmem capacity by 18.21M.",
    "tpu-oom-compile": TB
    + "RuntimeError: Bad StatusOr access: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 23.09G of 15.75G hbm. Exceeded hbm capacity by 7.34G.\n\nTotal hbm usage >= 23.34G:\n    reserved        258.00M\n    program          23.09G",
    "tpu-oom-reserve": "2026-04-04 00:27:49.642380: E tensorflow/compiler/xla/xla_client/xla_util.cc:88]   (1) RESOURCE_EXHAUSTED: Attempting to reserve 10.51G at the bottom of memory. That was not possible. There are 8.97G free, 0B reserved, and 8.97G reservable.",
    "tpu-oom-allocate": TB
    + "RuntimeError: RESOURCE_EXHAUSTED: Attempting to allocate 1.53G. That was not possible. There are 824.31M free.; (0x0x0_HBM0)",
    "tpu-oom-loading-program": "F0101 11:47:01.123456    8123 pjrt_computation_client.cc:511] Non-OK-status: status. Attempting to fetch value instead of handling error RESOURCE_EXHAUSTED: Error loading program: Attempting to reserve 9.03G\n*** SIGABRT received by PID 8123 ***\nAborted (core dumped)",
    "xla-resource-exhausted": TB
    + "ValueError: RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB (2147483648B) on device ordinal 0",
    "xla-cpu-oom": TB
    + "RuntimeError: Error preparing computation: Out of memory allocating 2000054784 bytes.",
    "cuda-oom": TB
    + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 1 has a total capacity of 14.74 GiB of which 170.12 MiB is free. Process 4031 has 14.56 GiB memory in use.",
    "cpu-oom": TB
    + "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)",
    "no-room-for-a-thread": TB + "RuntimeError: Resource temporarily unavailable",
    "host-oom-killed": "step 120 loss 3.21\nrun.sh: line 7:  2291 Killed                  python train.py --batch 256",
    "kernel-died": TB + "nbclient.exceptions.DeadKernelError: Kernel died",
    "segmentation-fault": "Fatal Python error: Segmentation fault\n\nThread 0x00007f1 (most recent call first):",
    "no-executable-batch-size": TB + "RuntimeError: No executable batch size found, reached zero.",
    "batch-size-finder-distributed": TB
    + "lightning.fabric.utilities.exceptions.MisconfigurationException: The Batch size finder is not supported with distributed strategies.",
    "shm-bus-error": TB
    + "RuntimeError: DataLoader worker (pid 1733) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
    "dataloader-worker-killed": TB
    + "RuntimeError: DataLoader worker (pid 99211) is killed by signal: Killed. ",
    "dataloader-worker-exited": TB
    + "RuntimeError: DataLoader worker (pid(s) 1882, 1883) exited unexpectedly",
    # -- TPU --------------------------------------------------------------------------------------
    "fp16-on-xla": TB + "ValueError: fp16 mixed precision requires a GPU (not 'xla').",
    "xla-autocast-dtype": UW
    + "torch_xla/amp/autocast_mode.py:36: UserWarning: In XLA:TPU autocast, but the target dtype is not supported. Disabling autocast.\nTPU Autocast only supports dtype of torch.bfloat16 currently.\n  warnings.warn(error_message)",
    "xla-autocast-ignored": "Warning: AMP only supported for XLA:TPU. Ignoring autocast.",
    "tpu-metric-server-port": 'E0000 00:00:1750000000.123456      10 common_lib.cc:798] Could not set metric server port: INVALID_ARGUMENT: Could not find SliceBuilder port 8471 in any of the 0 ports provided in `tpu_process_addresses`="local"',
    "tpu-slice-builder-addresses": "F0000 00:00:1713000000.000000    1021 tpu_slice_builder.cc:77] Invalid --2a886c8_slice_builder_worker_addresses specified. Expected 8 worker addresses, got 1.",
    "xla-runtime-initialized": TB
    + "RuntimeError: Runtime is already initialized. Do not use the XLA device before calling xmp.spawn.",
    "xmp-spawn-nprocs": TB
    + "ValueError: Unsupported nprocs (4). Please use nprocs=1 or None (default). If None, spawn will use all available devices. Use the environment variable X_NUM_DEVICES (where X is CPU, GPU, TPU, NEURONCORE, etc) to limit the number of devices used.",
    "xmp-spawn-nprocs-ignored": "stderr: WARNING:root:Unsupported nprocs (2), ignoring...",
    "xla-connection-lost": '2026-08-29 20:10:46.436423: W tensorflow/core/distributed_runtime/rpc/grpc_remote_master.cc:157] RPC failed with status = "UNAVAILABLE: Socket closed" and grpc_error_string = "{}", maybe retrying the RPC',
    "xla-too-many-parameters": TB
    + "RuntimeError: Invalid argument: Computation requires more parameters (812) than supported (limit 236).",
    "even-batches-without-size": TB
    + "ValueError: You need to use 'even_batches=False' when the batch sampler has no batch size. If you are not calling this method directly, set accelerator.even_batches=False instead.",
    "expected-processes": TB + "RuntimeError: Expected 4 processes but got 1",
    "max-workers-zero": TB + "ValueError: max_workers must be greater than 0",
    "process-pool-terminated": TB
    + "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly while the future was running or pending.",
    "tpu-device-busy": TB
    + "RuntimeError: Bad StatusOr access: UNKNOWN: TPU initialization failed: open(/dev/accel3): Operation not permitted: Operation not permitted; Couldn't open device: /dev/accel3",
    "libtpu-lockfile": "I0101 10:00:00.000000    1234 tpu_initializer_helper.cc:262] libtpu.so already in used by another process. Not attempting to load libtpu.so in this process.",
    "tpu-in-use-by-pid": TB
    + "RuntimeError: Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid 1337. Not attempting to load libtpu.so in this process.",
    "tpu-backend-init": TB
    + "RuntimeError: Unable to initialize backend 'tpu': INTERNAL: Failed to get global TPU topology. (you may need to uninstall the failing plugin package)",
    "xla-defaulting-to-cpu": "WARNING:root:Defaulting to PJRT_DEVICE=CPU",
    "xla-device-type-change": TB
    + "RuntimeError: Can't change device type after XLA runtime is initialized",
    "xla-missing-pjrt-device": TB
    + "RuntimeError: torch_xla/csrc/runtime/runtime.cc:25 : $PJRT_DEVICE is not set.",
    "not-an-xla-tensor": TB
    + "RuntimeError: torch_xla/csrc/aten_xla_bridge.cpp:110 : Check failed: xtensor \nRuntimeError: Input tensor is not an XLA tensor: CPUFloatType",
    "xla-wrong-device": TB
    + "RuntimeError: torch_xla/csrc/runtime/pjrt_computation_client.cc:744 : Check failed: pjrt_device == pjrt_data->buffer->device() (0x1d2a vs. 0x1d2b)",
    "xla-results-for-replica": TB + "AssertionError: 8 results for replica 0",
    "xla-rendezvous-failed": TB
    + "RuntimeError: tensorflow/compiler/xla/xla_client/mesh_service.cc:364 : Failed to meet rendezvous 'torch_xla.core.xla_model.save': Socket closed (14)",
    "xla-mark-step-failed": "worker 3: mark_step failed, exiting",
    "xla-stuck-collective": "2026-01-01 03:12:11.104: E external/xla/xla/service/rendezvous.cc:38] This thread has been waiting for 5000ms for and may be stuck: participant AllReduceParticipantData{replicas=8, element_count=1}",
    "xla-compile-too-frequent": "pt-xla-profiler: CompileTime too frequent: 811 counts during 900 steps",
    "xla-transfer-too-frequent": "pt-xla-profiler: TransferFromDeviceTime too frequent: 411 counts during 420 steps",
    "xla-op-not-lowered": "pt-xla-profiler: Op(s) not lowered: aten::nonzero, aten::_unique2,  Please open a GitHub issue with the above op lowering requests.",
    "xla-not-implemented-memory": TB
    + "RuntimeError: UNIMPLEMENTED: GetAllocatorStats not supported for CpuDevice.",
    "spawn-from-notebook": TB
    + "AttributeError: Can't get attribute 'train_fn' on <module '__main__' (built-in)>",
    "libtpu-metrics-unavailable": "Libtpu metrics unavailable. Is there a framework using the TPU? See https://github.com/google/cloud-accelerator-diagnostics/tree/main/tpu_info for more information",
    "launching-on-gpus-on-tpu": "Launching training on 4 GPUs.\n"
    + TB
    + "RuntimeError: An issue was found: TPU initialization",
    "xla-engine-assertion": TB
    + 'RuntimeError: 0 <= device.index() && device.index() < static_cast<c10::DeviceIndex>(device_ready_queues_.size()) INTERNAL ASSERT FAILED at "/pytorch/torch/csrc/autograd/engine.cpp":1517, please report a bug to PyTorch.',
    "tpu-metadata-server": TB
    + "requests.exceptions.ConnectionError: HTTPConnectionPool(host='metadata.google.internal', port=80): Max retries exceeded with url: /computeMetadata/v1/instance/attributes/tpu-env (Caused by NameResolutionError(\"Failed to resolve 'metadata.google.internal' ([Errno -2] Name or service not known)\"))",
    "torch-xla-launch-spmd": UW
    + "torch_xla/runtime.py:241: UserWarning: Replicating tensors already initialized on non-virtual XLA device for SPMD to force SPMD mode. This is one-time overhead to setup, and to minimize such, please set SPMD mode before initializting tensors (i.e., call use_spmd() in the beginning of the program).",
    # -- versions ---------------------------------------------------------------------------------
    "pjrt-api-mismatch": TB
    + "RuntimeError: Bad StatusOr access: UNIMPLEMENTED: Mismatched PJRT plugin PJRT API version (0.75) and framework PJRT API version 0.72).",
    "mosaic-version": TB
    + "RuntimeError: Bad StatusOr access: INTERNAL: Failed to deserialize the Mosaic module: INTERNAL: Unsupported version: expected <= 6 but got 7",
    "no-tpu-platform": TB
    + "RuntimeError: NOT_FOUND: No TPU platform found. Platform manager status: OK",
    "libtpu-unknown-flag": "ERROR: Unknown command line flag 'xla_tpu_use_enhanced_launch_barrier'",
    "xla-unknown-flag": "F0000 00:00:1710000000.000000  511 parse_flags_from_env.cc:225] Unknown flags in XLA_FLAGS: --xla_tpu_enable_async\nAborted",
    "tensorflow-beside-torch-xla": "WARNING:root:`tensorflow` can conflict with `torch-xla`. Prefer `tensorflow-cpu` when using PyTorch/XLA. To silence this warning, `pip uninstall -y tensorflow && pip install tensorflow-cpu`. If you are in a notebook environment such as Colab or Kaggle, restart your notebook runtime afterwards.",
    "wrong-libtpu-for-tensorflow": "E0101 10:00:00.5 31 tpu_api_dlsym_initializer.cc:91] TpuEmbeddingEngine_ExecutePartitioner not available in this library.",
    "xlac-undefined-symbol": TB
    + "ImportError: /usr/local/lib/python3.12/site-packages/_XLAC.cpython-312-x86_64-linux-gnu.so: undefined symbol: _ZN5torch4lazy13MetricFnValueB5cxx11Ed",
    "torch-extension-undefined-symbol": TB
    + "ImportError: /usr/local/lib/python3.12/dist-packages/flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
    "torchvision-mismatch": TB + "RuntimeError: operator torchvision::nms does not exist",
    "xla-model-attribute-gone": TB
    + "AttributeError: module 'torch_xla.core.xla_model' has no attribute 'xrt_world_size'",
    "xla-module-gone": TB
    + "ModuleNotFoundError: No module named 'torch_xla.experimental.xla_sharding'",
    "torch-xla-missing": TB + "ModuleNotFoundError: No module named 'torch_xla'",
    "libtpu-not-found": TB + "RuntimeError: libtpu not found. Please install libtpu.",
    "torch-tpu-extension": TB
    + "ImportError: torch_tpu has no extension module compatible with PyTorch 2.9.0",
    "tcmalloc-not-loaded": "WARNING: tcmalloc is not loaded; host performance may suffer.",
    "numpy-abi": "A module that was compiled using NumPy 1.x cannot be run in\nNumPy 2.1.3 as it may crash. To support both 1.x and 2.x\nversions of NumPy, modules must be compiled with NumPy 2.0.",
    "protobuf-descriptors": TB
    + "TypeError: Descriptors cannot be created directly.\nIf this call came from a _pb2.py file, your generated code is out of date and must be regenerated with protoc >= 3.19.0.",
    "glibcxx-missing": TB
    + "ImportError: /lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by /opt/lib/_XLAC.so)",
    "pip-conflict": "ERROR: pip's dependency resolver does not currently take into account all the packages that are installed. This behaviour is the source of the following dependency conflicts.\ntorchvision 0.24.0 requires torch==2.9.0, but you have torch 2.8.0 which is incompatible.",
    "pip-no-torch-xla-wheel": "ERROR: Could not find a version that satisfies the requirement torch_xla==2.10.0 (from versions: 2.6.0, 2.7.0, 2.8.0, 2.9.0)\nERROR: No matching distribution found for torch_xla==2.10.0",
    # -- CUDA -------------------------------------------------------------------------------------
    "cuda-no-kernel-image": UW
    + "torch/cuda/__init__.py:435: UserWarning: \nTesla P100-PCIE-16GB with CUDA capability sm_60 is not compatible with the current PyTorch installation.\nThe current PyTorch install supports CUDA capabilities sm_70 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120.\n"
    + TB
    + "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
    "bf16-not-native": TB
    + "ValueError: bf16 mixed precision requires PyTorch >= 1.10 and a supported device.",
    "unscale-fp16-gradients": TB + "ValueError: Attempting to unscale FP16 gradients.",
    "cuda-forked": TB
    + "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method",
    "cuda-not-compiled": TB + "AssertionError: Torch not compiled with CUDA enabled",
    "cuda-no-driver": TB
    + "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from http://www.nvidia.com/Download/index.aspx",
    "cuda-driver-too-old": TB
    + "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading and installing a new version",
    "cuda-driver-library-mismatch": "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.86",
    "cuda-device-assert": "../aten/src/ATen/native/cuda/Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: [3,0,0] Assertion failed.\n"
    + TB
    + "RuntimeError: CUDA error: device-side assert triggered",
    "cuda-illegal-access": TB
    + "RuntimeError: CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported at some other API call",
    "cuda-invalid-device": TB + "RuntimeError: CUDA error: invalid device ordinal",
    "cuda-deserialize-no-cuda": TB
    + "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False. If you are running on a CPU-only machine, please use torch.load with map_location=torch.device('cpu')",
    "cublas-failed": TB
    + "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k, &falpha)`",
    "nccl-timeout": "[rank2]:[E1120 10:11:12.131415161 ProcessGroupNCCL.cpp:629] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4411, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
    "nccl-error": TB
    + "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5",
    "nccl-duplicate-gpu": TB
    + "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, invalid usage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 40",
    "nccl-remote-error": TB
    + "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "ddp-unfinished-reduction": TB
    + "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss.",
    "ddp-marked-ready-twice": TB
    + "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a module parameter outside the `forward` function.",
    "loss-nan": "{'loss': 2.31, 'grad_norm': 1.2, 'epoch': 0.1}\n{'loss': nan, 'grad_norm': nan, 'epoch': 0.2}",
    "tf32-api-mix": TB
    + "RuntimeError: PyTorch is checking whether allow_tf32_new is enabled for cuBlas matmul,Current status indicate that you have used mix of the legacy and new APIs to set the TF32 status for cublas matmul.",
    "different-devices": TB
    + "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "gradient-on-other-device": TB
    + "RuntimeError: Function SubBackward0 returned an invalid gradient at index 0 - expected device cpu but got xla:0",
    "different-dtypes": TB
    + "RuntimeError: Input type (float) and bias type (c10::Half) should be the same",
    "half-not-implemented-cpu": TB
    + "RuntimeError: \"LayerNormKernelImpl\" not implemented for 'Half'",
    # -- launching --------------------------------------------------------------------------------
    "address-in-use": "[W1120 10:00:00.000 socket.cpp:436] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).\n[E socket.cpp:472] [c10d] The server socket has failed to listen on any local network address.",
    "rendezvous-timeout": TB + "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
    "rank-connection-lost": TB
    + "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:31187",
    "child-failed": "E1120 10:00:01.000 5150 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: -9) local_rank: 1 (pid: 5161) of binary: /usr/bin/python3\n"
    + TB
    + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "sigterm-from-agent": "W1120 10:00:00.000 5150 torch/distributed/elastic/multiprocessing/api.py:908] Sending process 5162 closing signal SIGTERM",
    "process-group-not-initialized": TB
    + "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
    "process-group-not-destroyed": "[rank0]:[W1120 10:00:00.000 ProcessGroupNCCL.cpp:1524] Warning: WARNING: destroy_process_group() was not called before program exit, which can leak resources.",
    "nccl-unknown-device-id": "[rank0]:[W1120 10:00:00.000 ProcessGroupNCCL.cpp:5023] [PG ID 0 PG GUID 0 Rank 0]  using GPU 0 as device used by this process is currently unknown. This can potentially cause a hang if this rank to GPU mapping is incorrect.",
    "omp-num-threads-notice": "W1120 10:00:00.000 4711 torch/distributed/run.py:774] Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded",
    "spawn-bootstrapping": TB
    + "RuntimeError: \n        An attempt has been made to start a new process before the\n        current process has finished its bootstrapping phase.",
    "notebook-launcher-cuda-initialized": TB
    + "RuntimeError: CUDA has been initialized before the `notebook_launcher` could create a forked subprocess. This likely stems from an outside import causing issues once the `notebook_launcher()` is called.",
    "broken-pipe-worker": '  File "/usr/lib/python3.12/multiprocessing/connection.py", line 399, in _recv\n    raise EOFError\nEOFError',
    "too-many-open-files": TB + "OSError: [Errno 24] Too many open files: '/dev/shm/torch_81_22'",
    "too-many-workers": UW
    + "torch/utils/data/dataloader.py:624: UserWarning: This DataLoader will create 32 worker processes in total. Our suggested max number of worker in current system is 4, which is smaller than what this DataLoader is going to create.",
    "disk-full": TB + "OSError: [Errno 28] No space left on device: '/kaggle/working/ckpt.pt'",
    "file-too-large": TB + "OSError: [Errno 27] File too large",
    "cuda-fork-tokenizers": "huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling parallelism to avoid deadlocks...",
    # -- files ------------------------------------------------------------------------------------
    "weights-only-load": TB
    + "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have two options, do those steps only if you trust the source of the checkpoint.\n\tWeightsUnpickler error: Unsupported global: GLOBAL argparse.Namespace was not an allowed global by default.",
    "safetensors-header": TB
    + "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
    "torch-file-damaged": TB
    + "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
    "state-dict-mismatch": TB
    + "RuntimeError: Error(s) in loading state_dict for GPT:\n\tsize mismatch for lm_head.weight: copying a param with shape torch.Size([50304, 768]) from checkpoint, the shape in current model is torch.Size([50257, 768]).",
    "optimizer-state-mismatch": TB
    + "ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
    "hub-unreachable": TB
    + "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.\nCheck your internet connection or see how to run the library in offline mode",
    "name-resolution": TB
    + "urllib.error.URLError: <urlopen error [Errno -3] Temporary failure in name resolution>",
    "hub-gated": TB
    + "huggingface_hub.errors.GatedRepoError: 403 Client Error. Cannot access gated repo for url https://huggingface.co/google/gemma-2b/resolve/main/config.json.",
    "hub-not-found": TB
    + "OSError: gtp2 is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'",
    "right-padding": "A decoder-only architecture is being used, but right-padding was detected! For correct generation results, please set `padding_side='left'` when initializing the tokenizer.",
    "no-padding-token": TB
    + "ValueError: Asking to pad but the tokenizer does not have a padding token. Please select a token to use as `pad_token` `(tokenizer.pad_token = tokenizer.eos_token e.g.)`",
    "pad-token-id-generation": "Setting `pad_token_id` to `eos_token_id`:50256 for open-end generation.",
    "sequence-too-long": "Token indices sequence length is longer than the specified maximum sequence length for this model (1713 > 1024). Running this sequence through the model will result in indexing errors",
    "invalid-escape-sequence": UW
    + "pydub/utils.py:300: SyntaxWarning: invalid escape sequence '\\('\n  m = re.match('([su]([0-9]{1,2})p?) \\(([0-9]{1,2}) bit\\)$', token)",
    "collate-unequal": TB
    + "RuntimeError: stack expects each tensor to be equal size, but got [211] at entry 0 and [87] at entry 1",
    "index-out-of-range-embedding": TB + "IndexError: index out of range in self",
    "target-out-of-bounds": TB + "IndexError: Target 10 is out of bounds.",
    "backward-twice": TB
    + "RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after they have already been freed).",
    "inplace-modified": TB
    + "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: [torch.FloatTensor [32, 64]], which is output 0 of ReluBackward0, is at version 1; expected version 0 instead.",
    "no-grad-fn": TB
    + "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
    "csv-encoding": TB
    + "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xe9 in position 1714: invalid continuation byte",
    # -- deprecations -----------------------------------------------------------------------------
    "use-torch-xla-device": "/kaggle/working/train.py:31: DeprecationWarning: Use torch_xla.sync instead\n  xm.mark_step()",
    "xla-environment-deprecated": UW
    + "torch_xla/__init__.py:179: UserWarning: The environment variable 'XLA_USE_BF16' is deprecated and has no effect.",
    "timm-layers-deprecated": UW
    + "timm/models/layers/__init__.py:49: FutureWarning: Importing from timm.models.layers is deprecated, please import via timm.layers\n  warnings.warn(",
    "timm-model-renamed": UW
    + "timm/models/_factory.py:126: UserWarning: Mapping deprecated model name vit_base_patch16_224_in21k to current vit_base_patch16_224.augreg_in21k.",
    "cuda-amp-deprecated": "/kaggle/working/train.py:77: FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated. Please use `torch.amp.autocast('cuda', args...)` instead.\n  with torch.cuda.amp.autocast():",
    "torch-load-future-warning": "/home/user/t.py:3: FutureWarning: You are using `torch.load` with `weights_only=False` (the current default value), which uses the default pickle module implicitly.",
    "checkpoint-use-reentrant": UW
    + "torch/_dynamo/eval_frame.py:632: UserWarning: torch.utils.checkpoint: the use_reentrant parameter should be passed explicitly. In version 2.5 we will raise an exception if use_reentrant is not passed.",
    "checkpoint-no-gradients": UW
    + "torch/utils/checkpoint.py:87: UserWarning: None of the inputs have requires_grad=True. Gradients will be None",
    "scheduler-order": UW
    + "torch/optim/lr_scheduler.py:240: UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`. In PyTorch 1.1.0 and later, you should call them in the opposite order",
    "autocast-disabled-no-cuda": UW
    + "torch/amp/autocast_mode.py:266: UserWarning: User provided device_type of 'cuda', but CUDA is not available. Disabling",
    "pin-memory-no-accelerator": UW
    + "torch/utils/data/dataloader.py:668: UserWarning: 'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used.",
    "accelerator-unexpected-keyword": TB
    + "TypeError: Accelerator.__init__() got an unexpected keyword argument 'dispatch_batches'",
    "distributed-type-tpu": TB
    + "AttributeError: type object 'DistributedType' has no attribute 'TPU'",
    "scheduler-verbose": TB
    + "TypeError: LinearLR.__init__() got an unexpected keyword argument 'verbose'",
    "training-arguments-keyword": TB
    + "TypeError: TrainingArguments.__init__() got an unexpected keyword argument 'evaluation_strategy'",
    "numpy-alias-gone": TB
    + "AttributeError: module 'numpy' has no attribute 'float'.\n`np.float` was a deprecated alias for the builtin `float`.",
    "pynvml-deprecated": UW
    + "torch/cuda/__init__.py:63: FutureWarning: The pynvml package is deprecated. Please install nvidia-ml-py instead.",
    "pkg-resources-deprecated": UW
    + "ctc/utils.py:1: UserWarning: pkg_resources is deprecated as an API. See https://setuptools.pypa.io/en/latest/pkg_resources.html.",
    "torch-distributed-launch-deprecated": UW
    + "torch/distributed/launch.py:207: FutureWarning: The module torch.distributed.launch is deprecated\nand will be removed in future. Use torchrun.",
    # -- processes and services ---------------------------------------------------------------------
    "input-without-a-terminal": TB + "EOFError: EOF when reading a line",
    "local-rank-argument": "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --local-rank=0",
    "cannot-pickle": TB + "AttributeError: Can't pickle local object 'make_data.<locals>.<lambda>'",
    "spawned-process-ended-early": 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n  File "/usr/lib/python3.12/multiprocessing/spawn.py", line 132, in _main\n    self = reduction.pickle.load(from_parent)\nEOFError: Ran out of input',
    "spawned-process-failed": TB
    + "torch.multiprocessing.spawn.ProcessExitedException: process 3 terminated with signal SIGABRT",
    "wandb-without-login": "wandb: ERROR api_key not configured (no-tty). call wandb.login(key=[your_api_key])\n"
    + TB
    + "wandb.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])",
    "wandb-failed": 'Traceback (most recent call last):\n  File "/usr/lib/python3.12/site-packages/wandb/sdk/wandb_init.py", line 900, in init\n    run = wi.init()\nwandb.errors.CommError: Run initialization has timed out after 90.0 sec.',
    "daemon-with-children": TB
    + "AssertionError: daemonic processes are not allowed to have children",
    "start-method-set-twice": TB + "RuntimeError: context has already been set",
    # -- kernels and number formats -----------------------------------------------------------------
    "flash-attention-old-gpu": TB
    + "RuntimeError: FlashAttention only supports Ampere GPUs or newer.",
    "triton-out-of-resources": TB
    + "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 82944, Hardware limit: 65536. Reducing block sizes or `num_stages` may help.",
    "triton-compile-failed": TB
    + "triton.compiler.errors.CompilationError: at 12:4: unsupported operation",
    "no-inf-checks": TB + "AssertionError: No inf checks were recorded for this optimizer.",
    "spmd-partition-spec": TB
    + "AssertionError: Partition spec length (2) should be equal to the input rank (1).",
    "spmd-wrapped-tensor": TB
    + "AttributeError: 'XLAShardedTensor' object has no attribute 'global_tensor'",
    "spmd-tuple-sharding": "F0000 00:00:1709131242.311197   36940 hlo_sharding.cc:1034] Check failed: IsTuple() \n*** Check failure stack trace: ***",
    "spmd-sharding-rejected": "Traceback (most recent call last):\n  File \"/usr/lib/python3.12/site-packages/torch_xla/distributed/spmd/xla_sharding.py\", line 582, in mark_sharding\n    op_sharding = mesh.get_op_sharding(partition_spec)\nTypeError: unhashable type: 'list'",
    "mosaic-kernel-failed": TB
    + "jaxlib.xla_extension.XlaRuntimeError: INTERNAL: Mosaic failed to compile TPU kernel: unsupported shape cast",
    "flash-attention-missing": TB
    + "ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following error: the package flash_attn seems to be not installed.",
    "flash-attention-rejected": TB
    + "ValueError: FlashAttention does not support inputs with dtype float32.",
    "triton-failed": TB + "RuntimeError: Internal Triton PTX codegen error",
    "shared-library-missing": TB
    + "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory",
    "cuda-libraries-mixed": TB
    + "RuntimeError: cuDNN version incompatibility: PyTorch was compiled against (9, 1, 0) but found runtime version (8, 9, 7).",
    # -- releases and code of earlier times -----------------------------------------------------------
    "xrt-era": TB + "RuntimeError: Aborted: Session 1a625b17752b2794 is not found.",
    "torch-xla-shadowed": TB + "AttributeError: module 'torch_xla' has no attribute '_XLAC'",
    "torch-xla-too-old": TB
    + "AttributeError: module 'torch_xla.core.xla_model' has no attribute 'rendezvous'",
    "torch-has-no-xla": TB + "AttributeError: module 'torch' has no attribute 'xla'",
    "jax-mismatch": TB + "AttributeError: module 'jax' has no attribute 'named_scope'",
    "libtpu-version": TB
    + "RuntimeError: FAILED_PRECONDITION: libtpu version 0.0.7 is older than the oldest that this program supports",
    "tokenizer-file-unreadable": 'Traceback (most recent call last):\n  File "/usr/lib/python3.12/site-packages/transformers/models/llama/tokenization_llama.py", line 198, in get_spm_processor\n    tokenizer.Load(self.vocab_file)\nTypeError: not a string',
    "tpu-not-found": TB + "RuntimeError: Bad StatusOr access: UNKNOWN: No ba16c7433 device found.",
    "spmd-failed": "F0000 00:00:1709131242.311197   36940 sharding_propagation.cc:34] Check failed: sharding has 2 tiles but the mesh has 8 devices",
    "nccl-not-built": TB + "RuntimeError: Distributed package doesn't have NCCL built in",
    "collective-on-cpu-tensor": TB
    + "RuntimeError: No backend type associated with device type cpu",
    "launched-command-failed": TB
    + "subprocess.CalledProcessError: Command '['/usr/bin/python', 'train.py']' returned non-zero exit status 1.",
    "unpickled-name-missing": TB
    + "AttributeError: Can't get attribute 'Net' on <module '__main__' from '/code/test.py'>",
    "network-failed": TB + "requests.exceptions.ReadTimeout: the server did not answer",
    "none-where-a-value-is-expected": TB
    + "AttributeError: 'NoneType' object has no attribute 'shape'",
    "attribute-not-in-object": TB + "AttributeError: 'Trainer' object has no attribute 'traine'",
    "tokenizer-newer-than-library": TB
    + "Exception: data did not match any variant of untagged enum ModelWrapper at line 757443 column 3",
    "slow-tokenizer-backend-missing": TB
    + "ValueError: Couldn't instantiate the backend tokenizer from one of: ",
    "model-newer-than-transformers": TB
    + "ValueError: The checkpoint you are trying to load has model type `qwen9` but Transformers does not recognize this architecture.",
    "model-type-key-error": 'Traceback (most recent call last):\n  File "/usr/lib/python3.12/site-packages/transformers/models/auto/configuration_auto.py", line 1038, in from_pretrained\n    config_class = CONFIG_MAPPING[config_dict["model_type"]]\nKeyError: \'qwen9\'',
    "numpy-2": TB + "ValueError: Unable to avoid copy while creating an array as requested.",
    "protobuf-message-factory": "AttributeError: 'MessageFactory' object has no attribute 'GetPrototype'",
    "rendezvous-retry": "[W socket.cpp:663] [c10d] The client socket has failed to connect to [localhost]:12355 (errno: 99 - Cannot assign requested address).",
    "pjrt-api-note": "I0000 00:00:1707861898.453443   82066 pjrt_api.cc:146] The PJRT plugin has PJRT API version 0.40. The framework PJRT API version is 0.40.",
    "hub-offline-switch": TB
    + "huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach https://huggingface.co/api/models/gpt2: offline mode is enabled. To disable it, please unset the `HF_HUB_OFFLINE` environment variable.",
    # -- classes of exceptions ------------------------------------------------------------------------
    "keyword-not-taken": TB + "TypeError: forward() got an unexpected keyword argument 'en'",
    "module-not-found": TB + "ModuleNotFoundError: No module named 'einops'",
    "name-not-in-module": TB
    + "ImportError: cannot import name 'AdamW' from 'transformers' (/usr/lib/transformers/__init__.py)",
    "attribute-not-in-module": TB + "AttributeError: module 'timm' has no attribute 'layerz'",
    "import-failed": TB + "ImportError: attempted relative import with no known parent package",
    "file-not-found": TB
    + "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.csv'",
    "permission-denied": TB + "PermissionError: [Errno 13] Permission denied: '/kaggle/input/x'",
    "sizes-do-not-fit": TB
    + "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x512 and 768x2)",
    "key-missing": TB + "KeyError: 'labels'",
    "index-too-high": TB + "IndexError: list index out of range",
    "assertion-failed": TB + "AssertionError: image size must be 224",
    "interrupted": TB + "KeyboardInterrupt",
    # -- torch_tpu --------------------------------------------------------------------------------
    "torch-tpu-oom": TB
    + "RuntimeError: e0200: failed to run executable -- the XLA compiler failed with: out of memory allocating 17179869184 bytes",
    "torch-tpu-operator-missing": TB
    + "RuntimeError: operator 'aten::linalg_eig' is not implemented for TPU",
    "torch-tpu-input-mismatch": TB + "RuntimeError: e0102: RuntimeProgramInputMismatch",
    "torch-tpu-internal-function": TB
    + "RuntimeError: torch.tpu.synchronize is internal to TorchTPU and can only be called by the torch package",
    "torch-tpu-world-size": TB + "RuntimeError: invalid world_size configuration: 2",
    "torch-tpu-failed-argument": TB + "RuntimeError: a required argument is in a failed state",
    "torch-tpu-reads-within-a-program": TB
    + "RuntimeError: nonzero(): cannot record EventSnapshot during an FX trace",
    "tpu-int64-all-reduce": TB
    + "RuntimeError: UNIMPLEMENTED: While rewriting computation to not contain X64 element types, XLA encountered an HLO for which this rewriting is not implemented: %all-reduce.18 = (s64[10]{0}, s64[]) all-reduce(s64[10]{0} %x, s64[] %y), to_apply=%Min.14",
    # -- families --------------------------------------------------------------------------------
    "pip-no-distribution": "ERROR: Could not find a version that satisfies the requirement torchtext==0.6.9 (from versions: 0.1.1, 0.18.0)\nERROR: No matching distribution found for torchtext==0.6.9",
    "package-build-failed": "  ERROR: Failed building wheel for frobnicate\nFailed to build frobnicate",
    "shared-memory-file-gone": TB
    + "RuntimeError: unable to open shared memory object </torch_1234_5678_9> in read-write mode: No such file or directory (2)",
    "process-aborted": "step 12 loss 3.1\nrun.sh: line 7:  2291 Aborted                 (core dumped) python train.py",
    "nccl-network": TB
    + "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1275, remote process exited or there was a network error, NCCL version 2.14.3\nLast error:\nsocketPollConnect: connect returned No route to host",
    "cuda-failed": TB
    + "torch.AcceleratorError: CUDA error: the launch timed out and was terminated",
    "cuda-capability-unsupported": "RuntimeError: CUDA capability sm_90 is not compatible with this build",
    "tpu-software-too-old": "Exception in model function for device=xla:2: Unimplemented: While rewriting computation to not contain X64 element types, XLA encountered an HLO for which this rewriting is not implemented",
    "tpu-hosts-not-started": "W0308 TPU backend initialization is taking more than 60.0 seconds. Did you run your code on all TPU hosts? See the manual",
    "tensor-type-on-xla": TB + "RuntimeError: Unimplemented backend XLA",
    "accelerator-not-found": "ERROR 01-26 17:51:44 engine.py:387] RuntimeError: Failed to infer device type",
    "weights-tagged-with-xla": TB
    + "RuntimeError: don't know how to restore data location of torch.storage.UntypedStorage (tagged with xla:0)",
    "operator-without-backend": TB
    + "NotImplementedError: Could not run 'aten::empty.memory_format' with arguments from the 'SparseXLA' backend. This could be because the operator doesn't exist for this backend",
    "fp16-on-tpu-type": TB
    + "RuntimeError: torch_xla/csrc/tensor_util.cpp:27 : Unsupported XLA type 10",
    "torch-jit-on-xla": TB + "RuntimeError: Unknown device",
    "cuda-home-missing": TB
    + "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.",
    "header-missing": "csrc/op.cpp:3:10: fatal error: Python.h: No such file or directory\n    3 | #include <Python.h>\ncompilation terminated.",
    "library-not-linked": "/usr/bin/ld: cannot find -lcuda: No such file or directory\ncollect2: error: ld returned 1 exit status",
    "compiler-gpu-architecture": "nvcc fatal   : Unsupported gpu architecture 'compute_120'",
    "host-compiler-too-new": "/usr/local/cuda/include/crt/host_config.h:143:2: error: #error -- unsupported GNU version! gcc versions later than 12 are not supported!",
    "deepspeed-cuda-mismatch": TB
    + "deepspeed.ops.op_builder.builder.CUDAMismatchException: >- DeepSpeed Op Builder: Installed CUDA version 11.5 does not match the version torch was compiled with 11.8, unable to compile cuda/cpp extensions without a matching cuda version.",
    "module-left-python": TB + "ModuleNotFoundError: No module named 'distutils'",
    "pkg-resources-gone": TB + "ModuleNotFoundError: No module named 'pkg_resources'",
    "submodule-not-found": TB + "ModuleNotFoundError: No module named 'torch._six'",
    "division-by-zero": TB + "ZeroDivisionError: division by zero",
    "name-not-defined": TB + "NameError: name 'load_model' is not defined",
    "syntax-error": TB + "SyntaxError: invalid syntax",
    "argument-missing": TB + "TypeError: forward() missing 1 required positional argument: 'mask'",
    "text-not-json": TB + "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    "config-value-invalid": TB
    + "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
    "recursion-too-deep": TB + "RecursionError: maximum recursion depth exceeded",
    "read-only-file-system": TB + "OSError: [Errno 30] Read-only file system: '/kaggle/input/x'",
    "connection-refused-or-lost": TB + "ConnectionRefusedError: [Errno 111] Connection refused",
    "http-status": TB
    + "requests.exceptions.HTTPError: 429 Client Error: Too Many Requests for url: https://files.example/x",
    "timed-out": TB + "TimeoutError: the lock was not given within 600 s",
    "image-unreadable": TB + "OSError: image file is truncated (12 bytes not processed)",
    "tensor-not-rectangular": TB + "ValueError: expected sequence of length 128 at dim 1 (got 97)",
    "package-required": TB
    + "ImportError: Using `low_cpu_mem_usage=True` requires Accelerate: `pip install 'accelerate>=0.26.0'`",
    "torch-load-needs-2-6": TB
    + "ValueError: Due to a serious vulnerability issue in `torch.load`, we now require users to upgrade torch to at least v2.6 in order to use the function. See CVE-2025-32434",
    "weights-unloadable": TB
    + "OSError: Unable to load weights from pytorch checkpoint file for 'model.bin' at 'model.bin'.",
    "model-class-unknown": TB
    + "ValueError: Unrecognized configuration class <class 'X'> for this kind of AutoModel: AutoModelForCausalLM.",
    "serving-memory": "ERROR 08-05 22:35:26 [core.py:1231] ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    "engine-process-failed": TB
    + "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    "compiled-graph-unsupported": TB
    + "torch._dynamo.exc.Unsupported: call_function BuiltinVariable(print)",
    "jax-traced-value": TB
    + "jax.errors.TracerBoolConversionError: Attempted boolean conversion of traced array with shape bool[].",
    "backend-not-implemented": TB + "NotImplementedError",
    "values-not-unpacked": TB + "ValueError: not enough values to unpack (expected 3, got 2)",
    "silent-and-waiting": "step 3 loss 2.1\ntpukit run: no output for 1800 s; 9 processes, 0.0 cores busy",
    "silent-and-busy": "tracing the step\ntpukit run: no output for 1800 s; 9 processes, 1.0 cores busy",
    "triton-image-invalid": TB
    + "RuntimeError: Triton Error [CUDA]: device kernel image is invalid",
    "ray-worker-died": "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "cxx-standard": "      /x/include/ATen/ATen.h:5:2: error: #error C++20 or later compatible compiler is required to use ATen.",
    "command-not-found": "./setup.sh: line 13: frob-cli: command not found",
    "cuda-gpu-newer-than-build": "NVIDIA B300 with CUDA capability sm_103 is not compatible with the current PyTorch installation.\nRuntimeError: CUDA error: no kernel image is available for execution on the device",
    "cuda-driver-start": "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before? Error 802: system not yet initialized",
    "cuda-driver-mismatch": 'Traceback (most recent call last):\n  File "/code/train.py", line 3, in <module>\n    run()\nRuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda driver combination',
    "cuda-graph-capture": 'Traceback (most recent call last):\n  File "/code/train.py", line 3, in <module>\n    run()\nRuntimeError: CUDA error: operation not permitted when stream is capturing',
    "torch-loads-other-library": "ImportError: /v/site-packages/torch/lib/libtorch_cuda.so: undefined symbol: ncclDevCommCreate",
    "torch-library-symbol": "Symbol not found: __ZN5torch3jit4frobE",
    "torchcodec-not-loaded": 'Traceback (most recent call last):\n  File "/code/train.py", line 3, in <module>\n    run()\nRuntimeError: Could not load libtorchcodec. Likely causes:\n  1. FFmpeg is not properly installed\nOSError: libavutil.so.58: cannot open shared object file: No such file or directory',
    "package-version-refused": 'Traceback (most recent call last):\n  File "/code/train.py", line 3, in <module>\n    run()\nImportError: Found an incompatible version of frobs.\nFound version 0.1.0, but only versions above 0.6.0 are supported',
    "build-needs-torch": "hint: This error likely indicates that `frob@2.8` depends on `torch`, but doesn't declare it as a build dependency.",
    "uv-no-solution": "  × No solution found when resolving dependencies:\n  ╰─▶ Because frob==2 depends on torch==9",
    "compiler-backend-aborted": "LLVM ERROR: Cannot select: intrinsic %llvm.amdgcn.frob",
    "tensor-classes-mixed": "Traceback (most recent call last):\n  File \"/code/train.py\", line 3, in <module>\n    run()\nTypeError: unsupported operand type(s) for *: 'Tensor' and 'Tensor'",
    "mixed-dtensor": 'Traceback (most recent call last):\n  File "/code/train.py", line 3, in <module>\n    run()\nRuntimeError: aten.add.Tensor: got mixed torch.Tensor and DTensor, need to convert',
    "mesh-too-few-devices": 'Traceback (most recent call last):\n  File "/code/train.py", line 3, in <module>\n    run()\nValueError: Number of devices 2 must be >= the product of mesh_shape (1, 4)',
    "dataset-scripts-gone": 'Traceback (most recent call last):\n  File "/code/train.py", line 3, in <module>\n    run()\nRuntimeError: Dataset scripts are no longer supported, but found frob.py',
    "image-tokens-differ": 'Traceback (most recent call last):\n  File "/code/train.py", line 3, in <module>\n    run()\nValueError: Video features and video tokens do not match, tokens: 12, features: 16',
    "tokenizer-config-newer": "Traceback (most recent call last):\n  File \"/code/train.py\", line 3, in <module>\n    run()\n  File \"/usr/lib/python3.12/site-packages/transformers/tokenization_utils_base.py\", line 7, in f\n    f(x)\nAttributeError: 'list' object has no attribute 'keys'",
    "remote-code-release": 'Traceback (most recent call last):\n  File "/code/train.py", line 3, in <module>\n    run()\n  File "/home/user/.cache/huggingface/modules/transformers_modules/frob/modeling.py", line 5, in f\n    ROPE["default"]\nKeyError: \'default\'',
    "distribution-not-found": 'Traceback (most recent call last):\n  File "/code/train.py", line 3, in <module>\n    run()\nimportlib.metadata.PackageNotFoundError: No package metadata was found for frob-lib',
    "dataset-empty": 'Traceback (most recent call last):\n  File "/code/train.py", line 3, in <module>\n    run()\nValueError: num_samples should be a positive integer value, but got num_samples=0',
    "map-process-died": 'Traceback (most recent call last):\n  File "/code/train.py", line 3, in <module>\n    run()\nRuntimeError: One of the subprocesses has abruptly died during map operation.',
    "cuda-capability-outside-range": "Found GPU0 Tesla P100-PCIE-16GB which is of cuda capability 6.0.\nMinimum and Maximum cuda capability supported by this version of PyTorch is (7.0) - (12.0)",
    "nccl-cuda-call": "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error: Cuda failure 'invalid argument'",
    "cuda-fabric-not-ready": "node:1 [0] transport/nvls.cc:254 NCCL WARN Cuda failure 802 'system not yet initialized'",
    "cuda-ptx-too-new": "torch.AcceleratorError: CUDA error: the provided PTX was compiled with an unsupported toolchain.",
    "gpu-xid": "NVRM: Xid (PCI:0000:06:00): 79, pid=12, GPU has fallen off the bus.",
    "cuda-not-found-by-xla": "E0000 00:00:1784797123.562530    2545 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: Failed call to cuInit: UNKNOWN ERROR (303)",
    "ptxas-too-old": "jax.errors.JaxRuntimeError: UNIMPLEMENTED: /usr/local/cuda/bin/ptxas ptxas too old. Falling back to the driver to compile.",
    "mesh-axis-unknown": "ValueError: Resource axis: expert of PartitionSpec(('data', 'expert'), None) is not found in mesh: ('data', 'model').",
    "xla-program-halted": "jax.errors.JaxRuntimeError: FAILED_PRECONDITION: The program continuator has halted unexpectedly.",
    "xla-donated-twice": "jax.errors.JaxRuntimeError: INVALID_ARGUMENT: Attempt to donate the same buffer twice in Execute() (flattened argument 8, replica 0)",
    "xla-transfer-guard": "jax.errors.JaxRuntimeError: INVALID_ARGUMENT: Disallowed host-to-device transfer: aval=ShapedArray(float32[3])",
    "jax-not-addressable": "jax.errors.JaxRuntimeError: INVALID_ARGUMENT: CopyArrays only supports destination device list of the same size as the array device lists.",
    "torchax-mixed-tensors": "AssertionError: usually this means there is a mixed math between XLATensor and torch.Tensor",
    "xla-argument-refused": "jax.errors.JaxRuntimeError: INVALID_ARGUMENT: No such compile option: 'frob'",
    "xla-not-implemented": "jax.errors.JaxRuntimeError: UNIMPLEMENTED: HLO all-reduce-start is not implemented on TPU.",
    "xla-call-not-registered": "jax.errors.JaxRuntimeError: NOT_FOUND: No FFI handler registered for frob on a platform CUDA",
    "xla-compiler-failed": "jax.errors.JaxRuntimeError: INTERNAL: Autotuning failed for HLO: %gemm = f64[6,16] fusion(...)",
    "option-unknown": "vllm: error: unrecognized arguments: --swap-space 4",
    "not-callable": "TypeError: 'bool' object is not callable",
    "remote-code-not-trusted": "ValueError: The repository frob contains custom code which must be executed to correctly load the model.",
    "numpy-array-to-scalar": "TypeError: only 0-dimensional arrays can be converted to Python scalars",
    "slurm-cancelled": "slurmstepd: error: *** JOB 1877080 ON r002 CANCELLED AT 2026-09-25T10:25:59 DUE TO PREEMPTION ***",
    "cxx-compiler-missing": "torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')",
    "cxx-compile-failed": "torch._inductor.exc.InductorError: CppCompileError: C++ compile error",
    "triton-not-installed": "RuntimeError: Cannot find a working triton installation. Either the package is not installed or it is too old. More information on installing Triton can be found at: https://github.com/triton-lang/triton",
    "recompile-limit": "torch._dynamo.exc.FailOnRecompileLimitHit: recompile_limit reached with one_graph=True. Excessive recompilations can degrade performance",
    "cudagraph-overwritten": "RuntimeError: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run.",
    "compiled-twice": "RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function. This is not supported at the moment.",
    "bitsandbytes-cuda": "RuntimeError: \n        CUDA Setup failed despite GPU being available. Please run the following command to get more information:\n\n        python -m bitsandbytes",
    "quantized-model-trained": "ValueError: You can't train a model that has been loaded in 8-bit or 4-bit precision on a different device than the one you're training on. Make sure you loaded the model on the correct device using for example `device_map={'':torch.cuda.current_device()}`",
    "model-spills-over": "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit the quantized model. If you want to dispatch the model on the CPU or the disk while keeping these modules in 32-bit, you need to set `llm_int8_enable_fp32_cpu_offload=True`",
    "lora-target-modules": "ValueError: Target modules {'q_proj', 'v_proj'} not found in the base model. Please check the target modules and try again.",
    "adapter-config-missing": "ValueError: Can't find 'adapter_config.json' at 'my/model'",
    "trainer-inputs": "ValueError: The model did not return a loss from the inputs, only the following keys: logits. For reference, the inputs it received are input_ids,attention_mask.",
    "trainer-settings": "ValueError: FP16 Mixed precision training with AMP or APEX (`--fp16`) and FP16 half precision evaluation (`--fp16_full_eval`) can only be used on CUDA or MPS devices or NPU devices or certain XPU devices (with IPEX).",
    "batch-sizes-contradict": "AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 32 != 1 * 1 * 8",
    "checkpoint-not-found": "ValueError: Can't find a valid checkpoint at ./results/checkpoint-500",
    "chat-template": "ValueError: Cannot use chat template functions because tokenizer.chat_template is not set and no template argument was passed!",
    "tokenizer-input-type": "ValueError: text input must be of type `str` (single example), `list[str]` (batch or single pretokenized example) or `list[list[str]]` (batch of pretokenized examples).",
    "transformers-import": "ModuleNotFoundError: Could not import module 'PreTrainedModel'. Are this object's requirements defined correctly?",
    "cache-class-changed": "ImportError: cannot import name 'EncoderDecoderCache' from 'transformers' (/usr/local/lib/python3.12/dist-packages/transformers/__init__.py)",
    "accelerate-visible-devices": 'NotImplementedError: Using RTX 4000 series doesn\'t support faster communication broadband via P2P or IB. Please set `NCCL_P2P_DISABLE="1"` and `NCCL_IB_DISABLE="1" or use `accelerate launch` which will do this automatically.',
    "lightning-devices": "lightning.fabric.utilities.exceptions.MisconfigurationException: You requested gpu: [0, 1]\n But your machine only has: [0]",
    "cuda-before-launch": "RuntimeError: Lightning can't create new processes if CUDA is already initialized. Did you manually call `torch.cuda.*` functions, have moved the model to the device, or allocated memory on the GPU any other way?",
    "keras-release": "ValueError: File format not supported: filepath=model. Keras 3 only supports V3 `.keras` files and legacy H5 format files (`.h5` extension).",
    "unsloth-refuses": "RuntimeError: Unsloth: You must call `FastLanguageModel.for_training(model)`",
    "serving-parallelism": "ValueError: Total number of attention heads (14) must be divisible by tensor parallel size (4).",
    "hub-repo-id": "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/kaggle/input/model'. Use `repo_type` argument if needed.",
    "hub-token": "huggingface_hub.errors.HfHubHTTPError: 403 Forbidden: None.\nCannot access content at: https://huggingface.co/api/repos/create.\nMake sure your token has the correct permissions.",
    "hub-slow": "RuntimeError: Data processing error: CAS service error : Reqwest Error: HTTP status client error (429 Too Many Requests)",
    "dataset-not-found": "datasets.exceptions.DatasetNotFoundError: Dataset 'foo/bar' doesn't exist on the Hub or cannot be accessed.",
    "dataset-config": "ValueError: Unknown split \"validation\". Should be one of ['train'].",
    "dataset-generation": "datasets.exceptions.DatasetGenerationError: An error occurred while generating the dataset",
    "dataset-cache-old": "NotImplementedError: Loading a dataset cached in a LocalFileSystem is not supported.",
    "kaggle-credentials": "kaggle.rest.ApiException: (403)",
    "service-credentials": "openai.AuthenticationError: Error code: 401 - {'error': {'message': 'Incorrect API key provided'}}",
    "rate-limited": "gdown.exceptions.FileURLRetrievalError: Failed to retrieve file url:",
    "archive-damaged": "soundfile.LibsndfileError: Error opening 'a.mp3': File contains data in an unknown format.",
    "certificate": "ssl.SSLCertVerificationError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get local issuer certificate",
    "audio-backend": "RuntimeError: Couldn't find appropriate backend to handle uri a.mp3 and format None.",
    "drive-disconnected": "OSError: [Errno 5] Input/output error",
    "system-memory-refused": "BlockingIOError: [Errno 11] Resource temporarily unavailable",
    "path-refused": "OSError: [Errno 36] File name too long",
    "lock-not-acquired": "sqlite3.OperationalError: database is locked",
    "pip-resolution-impossible": "ERROR: Cannot install -r requirements.txt (line 3) and numpy==2.1.0 because these package versions have conflicting dependencies.\nERROR: ResolutionImpossible: for help visit https://pip.pypa.io/en/latest/topics/dependency-resolution/#dealing-with-dependency-conflicts",
    "python-release-refused": "ERROR: Package 'foo' requires a different Python: 3.12.1 not in '<3.12,>=3.8'",
    "wheel-not-supported": "ERROR: foo-1.0-cp310-cp310-linux_x86_64.whl is not a supported wheel on this platform.",
    "externally-managed": "error: externally-managed-environment\n\n× This environment is externally managed",
    "pip-permission": "ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: '/usr/local/lib/python3.12'",
    "build-without-torch": "error: subprocess-exited-with-error\n× python setup.py egg_info did not run successfully.\n  ModuleNotFoundError: No module named 'torch'",
    "notebook-time-limit": "nbclient.exceptions.CellTimeoutError: A cell timed out while it was being executed, after 36000 seconds.",
    "notebook-cell-failed": "nbclient.exceptions.CellExecutionError: An error occurred while executing the following cell:",
    "docker-no-gpu": 'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
    "ray-memory": "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    "opencv-empty-image": "cv2.error: OpenCV(4.10.0) /io/opencv/modules/imgproc/src/color.cpp:196: error: (-215:Assertion failed) !_src.empty() in function 'cvtColor'",
    "opencv-failed": "cv2.error: Unknown C++ exception from OpenCV code",
    "data-not-finite": "ValueError: Input contains NaN, infinity or a value too large for dtype('float64').",
    "lengths-differ": "ValueError: Found input variables with inconsistent numbers of samples: [100, 99]",
    "text-not-a-number": "ValueError: could not convert string to float: 'abc'",
    "operands-of-two-types": "TypeError: unsupported operand type(s) for +: 'int' and 'NoneType'",
    "index-of-another-type": "TypeError: list indices must be integers or slices, not str",
    "not-json-serializable": "TypeError: Object of type Tensor is not JSON serializable",
    "event-loop-running": "RuntimeError: This event loop is already running",
    "console-encoding": "UnicodeEncodeError: 'charmap' codec can't encode character '\\u2588' in position 0: character maps to <undefined>",
    "protobuf-release": "ImportError: cannot import name 'runtime_version' from 'google.protobuf' (/usr/local/lib/python3.12/dist-packages/google/protobuf/__init__.py)",
    "torchaudio-mismatch": "RuntimeError: Detected that PyTorch and TorchAudio were compiled with different CUDA versions. PyTorch has CUDA version 12.8 whereas TorchAudio has CUDA version 12.6.",
    "operator-without-dtype": "RuntimeError: \"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Int'",
    "dtype-not-castable": "RuntimeError: one_hot is only applicable to index tensor.",
    "inplace-on-leaf": "RuntimeError: a leaf Variable that requires grad is being used in an in-place operation.",
    "numpy-of-tensor": "RuntimeError: Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.",
    "backward-of-non-scalar": "RuntimeError: grad can be implicitly created only for scalar outputs",
    "view-not-contiguous": "RuntimeError: view size is not compatible with input tensor's size and stride (at least one dimension spans across two contiguous subspaces). Use .reshape(...) instead.",
    "batch-norm-of-one": "ValueError: Expected more than 1 value per channel when training, got input size torch.Size([1, 256])",
    "loss-shapes": "ValueError: Using a target size (torch.Size([32])) that is different to the input size (torch.Size([32, 1])) is deprecated. Please ensure they have the same size.",
    "tensor-as-scalar": "RuntimeError: Boolean value of Tensor with more than one value is ambiguous",
    "tensor-size-refused": "RuntimeError: Trying to create tensor with negative dimension -1: [-1, 64]",
    "nothing-to-combine": "ValueError: max() arg is an empty sequence",
    "tensor-indexing": "IndexError: invalid index of a 0-dim tensor. Use `tensor.item()` in Python or `tensor.item<T>()` in C++ to convert a 0-dim tensor to a number",
    "wrapped-model-attribute": "torch.nn.modules.module.ModuleAttributeError: 'DataParallel' object has no attribute 'config'",
    "optimizer-without-parameters": "ValueError: optimizer got an empty parameter list",
    "inference-tensor": "RuntimeError: Inference tensors cannot be saved for backward. To work around you can make a clone to get a normal tensor and use it in autograd.",
    "gradient-shape": "RuntimeError: Function AddmmBackward0 returned an invalid gradient at index 1 - got [1] but expected shape compatible with [2]",
    "sampling-from-nan": "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
    "meta-tensor": "NotImplementedError: Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty() instead of torch.nn.Module.to() when moving module from meta to a different device.",
    "model-on-cpu-of-ddp": "ValueError: DistributedDataParallel device_ids and output_device arguments only work with single-device/multiple-device GPU modules or CPU modules, but got device_ids [0], output_device 0, and module parameters {device(type='cpu')}.",
    "ddp-nothing-trained": "RuntimeError: DistributedDataParallel is not needed when a module doesn't have any parameters that require a gradient.",
    "ddp-parameters-differ": "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=5, OpType=ALLREDUCE",
    "fsdp-dtypes-differ": "ValueError: `FlatParameter` requires uniform dtype but got torch.float32 and torch.bfloat16",
    "class-not-registered": "RuntimeError: Tried to instantiate class '__path__._path', but it does not exist! Ensure that it is registered via torch::class_",
    "float64-on-mps": "TypeError: Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please use float32 instead.",
    "mps-placeholder": "RuntimeError: Placeholder storage has not been allocated on MPS device!",
    "cuda-type-not-enabled": "RuntimeError: torch.cuda.FloatTensor is not enabled.",
    "collate-foreign-type": "TypeError: default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found <class 'PIL.Image.Image'>",
    "pin-memory-thread": "RuntimeError: Pin memory thread exited unexpectedly",
    "safetensors-shared": "RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk and potential differences when loading them again: [{'lm_head.weight', 'model.embed_tokens.weight'}].",
    "jax-backend-unknown": "RuntimeError: Unable to initialize backend 'axon': Backend 'axon' is not in the list of known backends: cpu, tpu. (set JAX_PLATFORMS='' to automatically choose an available backend)",
    "jax-sharding-divides": "ValueError: One of pjit arguments with pytree key path [0] was given the sharding of NamedSharding, which implies that the global size of its dimension 0 should be divisible by 8, but it is equal to 6",
    "jax-devices-differ": "ValueError: Received incompatible devices for jitted computation. Got argument x of f with shape float32[2] and device ids [0] on platform TPU and explicit output sharding with device ids [0, 1]",
    "jax-type-invalid": "TypeError: Argument 'x' of type <class 'str'> is not a valid JAX type.",
    "tensorflow-tpu-missing": "ValueError: Cannot find any TPU cores in the system. This may be due to an inactive TPU or a TPU reset is needed.",
    "tensorflow-oom": "tensorflow.python.framework.errors_impl.ResourceExhaustedError: OOM when allocating tensor with shape[32,512,512,64] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc",
    "xla-lowering-failed": "RuntimeError: Error while lowering: [] aten::_foobar",
    "xla-status": "RuntimeError: Bad StatusOr access: INVALID_ARGUMENT: Expected 8 worker addresses, got 1.",
    "misconfigured": "lightning.fabric.utilities.exceptions.MisconfigurationException: `max_epochs` must be a non-negative integer or -1.",
    "half-initialized-module": "AttributeError: partially initialized module 'torchvision' has no attribute 'extension' (most likely due to a circular import)",
    "generator-exhausted": TB + "StopIteration",
    "unused-in-graph": TB
    + "RuntimeError: One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is the desired behavior.",
    "cuda-malloc-async": 'RuntimeError: free_bytes <= total INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDAMallocAsyncAllocator.cpp":569, please report a bug to PyTorch.',
    "torch-internal-assert": 'RuntimeError: r INTERNAL ASSERT FAILED at "/pytorch/aten/src/ATen/core/jit_type.h":142, please report a bug to PyTorch.',
    "quantized-weight-plain": "AttributeError: 'Parameter' object has no attribute 'compress_statistics'",
    "distributed-checkpoint": 'Traceback (most recent call last):\n  File "/usr/lib/python3.12/site-packages/torch/distributed/checkpoint/state_dict_loader.py", line 250, in local_step\n    assert metadata is not None\nAssertionError',
    "cuda-library-of-another-release": "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
    "mosaic-not-partitioned": "Mosaic kernels cannot be automatically partitioned. Please wrap the call in a shard_map or xmap.",
    "xformers-mismatch": "  Please reinstall xformers (see https://github.com/facebookresearch/xformers#installing-xformers)",
    "dataloader-worker-error": "RuntimeError: DataLoader worker (pid 2804708) exited unexpectedly with exit code 1. Details are lost due to multiprocessing. Rerunning with num_workers=0 may give better error trace.",
    "attribute-read-only": "AttributeError: can't set attribute",
    "value-not-among-choices": "ValueError: fsdp7 is not a valid FSDPOption, please select one of ['full_shard', 'offload']",
    "arguments-exclude-each-other": "ValueError: You can't pass `load_in_4bit` as a kwarg when passing `quantization_config` argument at the same time.",
    "compiled-backward": "RuntimeError: Function CompiledFunctionBackward returned an invalid gradient at index 2 - got [253] but expected shape compatible with [1, 253]",
    "gradient-given-to-backward": "RuntimeError: Mismatch in shape: grad_output[0] has a shape of torch.Size([1]) and output[0] has a shape of torch.Size([]).",
    "write-into-expanded": "RuntimeError: unsupported operation: more than one element of the written-to tensor refers to a single memory location. Please clone() the tensor before performing the operation.",
    "xla-compile-defect": "F0101 10:00:00.000000 12 debug_macros.h:20] Non-OK-status: status.status() status: INTERNAL: during context [post-optimization]: Expected instruction to have shape equal to bf16[4], actual shape is bf16[8]",
    "library-lacks-symbol": "OSError: /usr/lib/libfrob_engine.so: undefined symbol: _ZN4frob9to_stringEi",
    "torch-halves-differ": "ImportError: /usr/local/lib/python3.12/site-packages/torch/_C.so: undefined symbol: _ZN4thpp10THCSTensorIlEC1E",
    "unpickled-by-newer-torch": "AttributeError: Can't get attribute '_rebuild_tensor_v2' on <module 'torch._utils' from '/usr/lib/torch/_utils.py'>",
    "jax-mapped-axes": "ValueError: pmap got inconsistent sizes for array axes to be mapped:",
    "flax-random-key": "flax.errors.InvalidRngError: RNGs should be of shape (2,) in Module Dense, but rngs are: 3",
    "package-hidden": "ImportError: cannot import name 'load_frob' from 'frobs' (unknown location)",
}
