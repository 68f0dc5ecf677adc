# ruff: noqa: E501 - a case is one line
"""Forms and families of errors that no entry was written for: what the answer may and must say."""

import pytest
from explained_logs import causes, explained

from tpukit.knowledge.error_table import known_errors
from tpukit.probe.logs import explain_log, open_log

TB = 'Traceback (most recent call last):\n  File "/code/train.py", line 3, in <module>\n    run()\n'
LIBRARY = '  File "/usr/lib/python3.12/site-packages/{}", line 7, in {}\n    f(x)\n'
TRACKER = (
    "wandb: Run x errored: RuntimeError('Caught RuntimeError in DataLoader worker process 0."
    '\\nOriginal Traceback (most recent call last):\\n  File "/code/data.py", line 3, in f\\n    a()'
    "\\nRuntimeError: stack expects each tensor to be equal size, but got [3] at entry 0\\n')"
)
CODEC = (
    "RuntimeError: Could not load libtorchcodec. Likely causes:\n  1. FFmpeg is not properly installed in your environment. We support\n     versions 4, 5, 6, 7, and 8.\n"
    "  2. The PyTorch version ({}) is not compatible with\n     this version of TorchCodec. Refer to the version compatibility\n     table:\n"
    "[start of libtorchcodec loading traceback]\nFFmpeg version 8: {}"
)
KEYS = 'RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "{}layer.0.norm.weight", "{}layer.0.norm.bias"{}.\n\tUnexpected key(s) in state_dict: "{}layer.0.norm.bias", "{}layer.0.norm.weight". '
CASES = {
    "pip of torch alone": ("ERROR: No matching distribution found for torch==1.7.1+cu110", "pip-no-distribution", "torch"),
    "pip of another package": ("ERROR: No matching distribution found for torchtext==0.6.9", "pip-no-distribution", "torchtext"),
    "NCCL's last error": (TB + "torch.distributed.DistBackendError: NCCL error in: a.cpp:1, remote process exited or there was a network error, NCCL version 2.14.3\nLast error:\nsocketPollConnect: connect returned No route to host", "nccl-network", "NCCL_SOCKET_IFNAME"),
    "shared memory that was removed": (TB + "RuntimeError: unable to open shared memory object </torch_1_2_3> in read-write mode: No such file or directory (2)", "shared-memory-file-gone", "file_system"),
    "open files": (TB + "RuntimeError: unable to open shared memory object </torch_1_2_3> in read-write mode: Too many open files (24)", "too-many-open-files", "ulimit"),
    "a removed submodule": (TB + "ModuleNotFoundError: No module named 'torch._six'", "submodule-not-found", "release"),
    "a module that left Python": (TB + "ModuleNotFoundError: No module named 'distutils'", "module-left-python", "Python"),
    "vLLM's lines": ("ERROR 01-26 17:51:44 engine.py:387] RuntimeError: Failed to infer device type", "accelerator-not-found", "torch_xla"),
    "vLLM's lines in brackets": ("(EngineCore pid=12) ERROR 08-05 22:35:26 [core.py:1231] KeyError: 'labels'", "key-missing", "labels"),
    "an old TPU": ("Exception in model function for device=xla:2: Unimplemented: While rewriting computation to not contain X64 element types, XLA", "tpu-software-too-old", "older"),
    "one host of several": ("TPU backend initialization is taking more than 60.0 seconds. Did you run your code on all TPU hosts?", "tpu-hosts-not-started", "every host"),
    "a debugger's line": ("ipdb> x.type(t)\n*** RuntimeError: Unimplemented backend XLA", "tensor-type-on-xla", ".to("),
    "a header": ("op.cpp:1:10: fatal error: Python.h: No such file or directory\ncompilation terminated.", "header-missing", "python3-dev"),
    "a linker": ("/usr/bin/ld: cannot find -lcuda: No such file or directory\ncollect2: error: ld returned 1 exit status", "library-not-linked", "libcuda"),
    "a tracker's one line": (TRACKER, "collate-unequal", "shapes"),
    "resources of a kernel": (TB + "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.", "triton-out-of-resources", "shared"),
    "an embedding's index": ("../Indexing.cu:1: indexSelectLargeIndex: block: [1,0,0], thread: [2,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n" + TB + "RuntimeError: CUDA error: device-side assert triggered", "index-out-of-range-embedding", "vocabulary"),
    "zsh's crash": ("[1]    18472 segmentation fault (core dumped)  python train.py", "segmentation-fault", "library"),
    "bash's abort": ("run.sh: line 3: 12 Aborted                 (core dumped) python train.py", "process-aborted", "check"),
    "a warning that pytest raises": ("/venv/lib/python3.13/site-packages/frob/core.py:32: in <module>\nE       DeprecationWarning: frob.core.speed is deprecated as of Frob v2.", "warning-as-error", "frob.core.speed"),
    "ComfyUI's line": ("x can be ignored when loading\n!!! Exception during processing !!! list index out of range", "index-too-high", "length"),
    "weights of another layout": (TB + LIBRARY.format("vllm/models/frob.py", "load_weights").replace("f(x)", "param.weight_loader(param, loaded)") + "RuntimeError: The size of tensor a (8) must match the size of tensor b (4) at non-singleton dimension 1", "weights-do-not-fit", "quantization"),
    "shard_map's arguments": ("TypeError: shard_map() got an unexpected keyword argument 'check_rep'", "jax-shard-map-arguments", "check_vma"),
    "a loss scale": ("Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.", "loss-scale-at-minimum", "bf16"),
    "a service's name before the level": ("vllm  | (Worker_TP0 pid=407) ERROR 04-24 18:37:45 [a.py:971] RuntimeError: Unsupported architecture of flashinfer", "kernel-refuses", "backend"),
    "a crash behind a test's name": ("tests/a.py::Test::test_b F0319 00:41:59.293393     447 algorithm.cc:5336] Check failed: frob != 1 Conflicting", "native-check-failed", "Check failed: frob"),
    "another process's exception in a report": (TB + "RuntimeError: Worker failed with error 'KeyError: 'speed'', please check the stack trace above", "key-missing", "speed"),
    "a file that is not written": (TB + 'ValueError: NOT_FOUND: Error writing "a/c/0" in OCDBT database at local file "/ckpt/0.tmp/process_0/": Failed to rename fd: 14', "words-write", "another process"),
    "an extension's kernel": ("RuntimeError: RMSNorm failed with error code no kernel image is available for execution on the device", "extension-no-kernel-image", "not torch"),
    "a launch that failed in JAX": ("jax.errors.JaxRuntimeError: INTERNAL: CUDA_ERROR_LAUNCH_FAILED", "cuda-illegal-access", "only waited"),
    "a missing processor": ("ValueError: Processor was not found, please check your model file.", "processor-missing", "preprocessor_config.json"),
    "pytest's summary": ("FAILED tests/test_a.py::test_b[x/y] - TypeError: Frob.run() got an unexpected keyword argument 'speed'", "keyword-not-taken", "speed"),
    "a tag before the level": ("[Stage-3] ERROR 03-12 08:22:28 [a.py:8] ValueError: Free memory on device cuda:1 (1.0/8.0 GiB) on startup is less than desired GPU memory utilization (0.9, 7.2 GiB).", "serving-memory", "other processes"),
    "structlog's JSON": ('{"level": "error", "event": "KeyError: \'labels\'"}', "key-missing", "labels"),
    "a list's item that is an exception": ("Actual:\n- `RuntimeError: CUDA error: no kernel image is available for execution on the device`", "cuda-no-kernel-image", "cu128"),
    "a notice alone": ("WARNING: An NVIDIA GPU may be present on this machine, but a CUDA-enabled jaxlib is not installed. Falling back to cpu.", "jax-on-the-cpu", "jax[cuda12]"),
    "who asks JAX for what it has no more": (TB + LIBRARY.format("chex/_src/pytypes.py", "<module>").replace("f(x)", "A = jax.interpreters.batching.BatchTracer") + "AttributeError: jax.interpreters.batching.BatchTracer is deprecated", "jax-removed", "pip install -U chex"),
    "a layer that another library's class has later": ("AttributeError: 'Qwen3DecoderLayer' object has no attribute 'frob_attn'", "attribute-not-in-object", "transformers"),
    "a message that goes on": ("tvm.error.InternalError: Check failed: (status == cudaSuccess) is false:\n  BatchPrefillWithPagedKVCache failed with error invalid resource handle", "flashinfer-kernel", "KV cache"),
    "a batch's key as a number": ("ValueError: invalid literal for int() with base 10: 'input_ids'", "template-returns-dictionary", "return_dict"),
    "a text as a number": (TB + "ValueError: could not convert string to float: 'n/a'", "text-not-a-number", "'n/a'"),
    "widths of a user's own layers": (TB + "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x512 and 1024x10)", "linear-input-size", "in_features"),
    "compilers of two CUDA releases": ("RuntimeError: ('The detected CUDA version (%s) mismatches the version that was used to compilePyTorch (%s). Please make\n      sure to use the same CUDA versions.', '13.0', '12.8')", "build-with-another-cuda", "--no-build-isolation"),
    "a table that is read by a variable": (TB + LIBRARY.format("frob/tags.py", "encode").replace("f(x)", "return self.tags_to_idx[key]") + "KeyError: 'ATag'", "key-missing", "`self.tags_to_idx` has no key `ATag`"),
    "a key that the user's line names": ('Traceback (most recent call last):\n  File "/code/train.py", line 3, in <module>\n    x = sample["labels"]\n' + LIBRARY.format("frob/base.py", "__getitem__").replace("f(x)", "return self.data[item]") + "KeyError: 'labels'", "key-missing", "`sample` has no key `labels`"),
    "a position in a table with gaps": (TB + "KeyError: 17", "position-as-key", "reset_index"),
    "a class of another library than transformers": ("TypeError: DownloadConfig.__init__() got an unexpected keyword argument 'trust_remote_code'", "keyword-not-taken", "datasets<4"),
    "pip's complaint alone": ("frobs 4.5 requires hub<1.0, but you have hub 1.0.0 which is incompatible.", "pip-conflict", "hub<1.0"),
    "what Inductor raised, on the next line": ("torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\nLoweringException: NoValidChoicesError: \n  target: aten.mm.default", "inductor-no-choices", "ATEN"),
    "a loading script, as datasets 4 says it": ("`trust_remote_code` is not supported anymore.\nPlease check that the Hugging Face dataset 'hotpot_qa' isn't based on a loading script and remove `trust_remote_code`.", "dataset-scripts-gone", "`hotpot_qa`"),
    "a part of what has no parts": ("ModuleNotFoundError: No module named 'vllm.lora.models'; 'vllm.lora' is not a package", "module-is-no-package", "`vllm.lora` is a single module"),
    "what holds only for some": (TB + LIBRARY.format("frob/core.py", "f") + "FrobError: int3 is only supported for wide models", "words-only-for", "`frob` takes int3 only for wide models"),
    "a device that is not there, in words": ("ValueError: The requested device for frobs (cuda:1) is not available.", "words-not-supported", "does not support requested device for frobs (cuda:1)"),
    "an import without its class": ("Error loading module nodes: cannot import name 'Frob' from 'frobs' (/site-packages/frobs/__init__.py)", "name-not-in-module", "frobs"),
    "a missing module without its class": ("Missing required packages: No module named 'frobs'", "module-not-found", "frobs"),
    "a wrapped message": ("ImportError: cannot import name 'Frob' from\n'frobs.models.frob' (/frobs/models/frob.py)", "name-not-in-module", "frobs.models.frob"),
    "a status in an exception's message": ("huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/api/x", "http-status", "429"),
    "a GPU that is newer": ("NVIDIA B300 with CUDA capability sm_103 is not compatible with the current PyTorch installation.\nRuntimeError: CUDA error: no kernel image is available for execution on the device", "cuda-gpu-newer-than-build", "cu128"),
    "ptxas beside a range": ("Found GPU0 NVIDIA GB10 which is of cuda capability 12.1.\nMinimum and Maximum cuda capability supported by this version of PyTorch is (8.0) - (12.0)\nptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'", "compiler-gpu-architecture", "TRITON_PTXAS_PATH"),
    "a container's libcuda": (TB + "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda driver combination", "cuda-driver-mismatch", "compat"),
    "a graph's recording": (TB + "RuntimeError: CUDA error: operation not permitted when stream is capturing", "cuda-graph-capture", "enforce_eager"),
    "torchcodec": (TB + "RuntimeError: Could not load libtorchcodec. Likely causes:\n  1. FFmpeg is not properly installed\nOSError: libavutil.so.58: cannot open shared object file: No such file or directory", "torchcodec-not-loaded", "FFmpeg"),
    "a model's own code": (TB + '  File "/home/user/.cache/huggingface/modules/transformers_modules/frob/modeling.py", line 5, in f\n    ROPE["default"]\n' + "KeyError: 'default'", "remote-code-release", "transformers_version"),
    "labels of 32 bits": ("RuntimeError: expected scalar type Long but found Int", "dtype-not-castable", ".long()"),
    "integers in a mean": ("RuntimeError: Found dtype Long but expected Float", "dtype-not-castable", ".float()"),
    "a warning that names the reason": ("/lib/torch/cuda/__init__.py:182: UserWarning: CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up environment\nRuntimeError: No CUDA GPUs are available", "cuda-unknown-error", "nvidia_uvm"),
    "ROCm under CUDA's name": ("torch.AcceleratorError: CUDA error: unspecified launch failure\nSearch for `hipErrorLaunchFailure' in https://rocm.docs.amd.com", "rocm-memory-fault", "HSA_OVERRIDE_GFX_VERSION"),
    "ROCm's kernel file": ("torch.AcceleratorError: CUDA error: invalid kernel file\nSearch for `hipErrorInvalidKernelFile' in https://rocm.docs.amd.com", "rocm-architecture", "gfx"),
    "a status in an extension's quotes": ("RuntimeError: Failed: CUDA error /frob/kernels/runtime.cu:58 'invalid device function'", "extension-no-kernel-image", "runtime.cu"),
    "a build that was killed": ("FAILED: [code=137] flash_bwd.o\nKilled\nninja: build stopped: subcommand failed.", "compiler-killed", "MAX_JOBS"),
    "g++ killed": ("g++: fatal error: Killed signal terminated program cc1plus", "compiler-killed", "cc1plus"),
    "an image newer than the driver": ("nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8, please update your driver to a newer version, or use an earlier cuda container: unknown", "cuda-driver-too-old", "Update the driver"),
    "NCCL's shared memory": ("vm:1:2 [1] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-7xG to 96 bytes, error: No space left on device (28)", "nccl-shared-memory", "--shm-size"),
    "NVLink SHARP": ("n:1:2 [0] transport/nvls.cc:254 NCCL WARN Cuda failure 801 'operation not supported'\ntorch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled cuda error", "nccl-nvls", "NCCL_NVLS_ENABLE=0"),
    "empty weights of ZeRO-3": (TB + "RuntimeError: The size of tensor a (0) must match the size of tensor b (4096) at non-singleton dimension 1", "sharded-weight-outside", "GatheredParameters"),
    "a heartbeat that ends": ("[rank0]:[E1110 02:11:32.005 ProcessGroupNCCL.cpp:1784] [PG ID 0 PG GUID 0(default_pg) Rank 0] Heartbeat monitor timed out! Process will be terminated after dumping debug info.", "nccl-timeout", "rank"),
    "Slurm's accounts": ("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)", "slurm-refused", "accounting/QOS policy"),
    "DeepGEMM in another class": ("tvm.error.InternalError: Assertion error (/deepgemm/csrc/apis/hyperconnection.hpp:56): Unsupported architecture", "deepgemm-check", "VLLM_USE_DEEP_GEMM=0"),
    "a UUID for a number": (TB + "ValueError: invalid literal for int() with base 10: 'MIG-5c1b2f3e-7c7c'", "visible-devices-not-numbers", "nvidia-smi -L"),
    "a GPU's generation": (TB + LIBRARY.format("frob/core.py", "f") + "RuntimeError: frob_gemm requires SM90 or later", "gpu-below-format", "SM90"),
    "a header in quotes": ("a.cu:1:10: fatal error: 'cuda_runtime.h' file not found", "header-missing", "`cuda_runtime.h`"),
    "Windows' compiler": ("host_config.h(164): fatal error C1189: #error:  -- unsupported Microsoft Visual Studio version! Only the versions between 2017 and 2022 (inclusive) are supported!", "host-compiler-too-new", "Visual Studio 2022"),
    "a vLLM folder in the way": (TB + "ModuleNotFoundError: No module named 'vllm._C'", "compiled-part-hidden", "hides"),
    "an assertion about sizes": (TB + LIBRARY.format("frob/core.py", "f") + "AssertionError: row size 6 is not divisible by 4", "sizes-do-not-fit", "shapes"),
    "an error in bold": ("- **Error**: `torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 14.00 GiB`", "cuda-oom", "memory"),
    "an advice that reduces": ("OutOfResources: out of resource: shared memory, Required: 106496, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.", "triton-out-of-resources", "block"),
    "ranks that share a cache": (TB + "FileNotFoundError: [Errno 2] No such file or directory: '/home/me/.triton/cache/5GXG/frob.json'", "compile-cache-lost", "TRITON_CACHE_DIR"),
    "a cache in a closed folder": (TB + "PermissionError: [Errno 13] Permission denied: '/.triton'", "compile-cache-denied", "TRITON_CACHE_DIR"),
    "a worker without a word": ("(EngineCore pid=1345) ERROR 04-14 23:32:32 [core.py:936] RuntimeError: Worker proc VllmWorker-1 died unexpectedly. See stack trace for root cause.", "server-worker-died", "dmesg"),
    "a list of capabilities": ("RuntimeError: torch._frob is only supported on CUDA devices with compute capability >= 9.0 or 8.9", "gpu-below-format", "compute capability >= 9.0"),
    "apex without its kernels": (TB + "ModuleNotFoundError: No module named 'fused_layer_norm_cuda'", "apex-extensions", "AdamW"),
    "FlashInfer's kernel": (TB + "RuntimeError: BatchPrefillWithPagedKVCache failed with error invalid argument", "flashinfer-kernel", "invalid argument"),
    "a DLL beside a module": ("FileNotFoundError: Could not find module 'cudart64_12.dll' (or one of its dependencies). Try using the full path with constructor syntax.", "shared-library-missing", "cudart64_12.dll"),
    "nvcc's end": ("error: command '/opt/conda/bin/nvcc' failed with exit code 255", "nvcc-failed", "MAX_JOBS"),
    "a build killed by CMake": ("Killed\n[41/104] Building CUDA object CMakeFiles/frob.dir/csrc/frob.cu.o\nFAILED: CMakeFiles/frob.dir/csrc/frob.cu.o", "compiler-killed", "MAX_JOBS"),
    "bitsandbytes' own line": ("Error no kernel image is available for execution on the device at line 119 in file /src/csrc/ops.cu", "extension-no-kernel-image", "ops.cu"),
    "memory that torch does not hold": ("torch.OutOfMemoryError: XPU out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 11.33 GiB. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes", "gpu-memory-not-ours", "ZE_AFFINITY_MASK"),
    "SYCL's exception": ("terminate called after throwing an instance of 'sycl::_V1::exception'\n  what():  The program was built for 1 devices", "xpu-failed", "driver"),
    "an option of a server": (TB + LIBRARY.format("frob/args.py", "check") + "ValueError: --enable-frob must be used with a frob of one chip", "words-option", "`--enable-frob`"),
    "a service's variable": ("ValueError: VLLM_PORT 'tcp://10.0.0.1:8000' appears to be a URI. This may be caused by a Kubernetes service discovery issue.", "port-of-a-service", "enableServiceLinks"),
    "torch's level without a process id": ("[E1103 11:02:13.114 frob.cpp:683] the frob failed: KeyError: 'labels'", "key-missing", "labels"),
    "halves beside floats": ("RuntimeError: expected scalar type Half but found Float", "different-dtypes", "autocast"),
    "a worker's bus error": ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).", "shm-bus-error", "shm"),
    "an XLA check": ("RuntimeError: torch_xla/csrc/tensor_impl.cpp:92 : Check failed: bridge::IsXlaTensor(tensor)", "not-an-xla-tensor", "to(device)"),
    "fp16's scale": ("FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.", "loss-scale-at-minimum", "fp16"),
    "cuDNN's search": ("RuntimeError: FIND was unable to find an engine to execute this computation", "cublas-failed", "smaller batch"),
    "SLURM's limit": ("slurmstepd: error: Detected 3 oom_kill events in StepId=12.0. Some of the step tasks have been OOM Killed.", "host-oom-killed", "memory"),
    "half of NumPy's advice": ("downgrade to 'numpy<2' or try to upgrade the affected module.", "numpy-abi", "numpy<2"),
    "an advice to try again": ("`frob/12b` is not supported yet in `transformers==5.5.0`. Please update transformers and try again.", "model-newer-than-transformers", "pip install -U"),
    "hydra's line": ("[2026-01-02 03:04:05,678][__main__][ERROR] - KeyError: 'labels'", "key-missing", "labels"),
    "an indented excerpt of JAX's": ("ran until\n      jax.errors.JaxRuntimeError: UNIMPLEMENTED: HLO all-reduce-start is not implemented on TPU.", "xla-not-implemented", "other operations"),
    "marks above an indented error": ("      x = int(a)\n          ^^^^^^\n    TypeError: only 0-dimensional arrays can be converted to Python scalars", "numpy-array-to-scalar", ".item()"),
    "NCCL's quoted cause": ("NCCL error: ncclUnhandledCudaError: Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'\nNCCL version 2.28.9", "cuda-driver-too-old", "driver"),
    "a job's end": ("slurmstepd: error: *** JOB 7 ON n CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***", "slurm-cancelled", "--time"),
    "an exception named by its module": ("requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='frob.org'): Read timed out.", "network-failed", "server"),
    "a message that begins with a number": ("RuntimeError: 0D or 1D target tensor expected, multi-target not supported", "loss-shapes", "labels"),
    "an exception's repr": ("(<class 'RuntimeError'>, RuntimeError('DataLoader worker (pid(s) 16143) exited unexpectedly'), <traceback>)", "dataloader-worker-exited", "num_workers=0"),
    "JAX's outer class": ("FilteredStackTrace: RuntimeError: jaxlib is version 0.3.25, but this version of jax requires version >= 0.4.19.", "jax-mismatch", "jaxlib"),
    "an import's reason on the next line": ("RuntimeError: Failed to import transformers.a because of the following error (look up to see its traceback):\nFailed to import transformers.b because of the following error (look up to see its traceback):\nmodule 'torch' has no attribute 'compiler'", "attribute-not-in-module", "torch"),
    "a call's error without its class": ("FrobTrainer.__init__() got an unexpected keyword argument 'gamma'", "keyword-not-taken", "gamma"),
    "an import that was survived": ("Error loading /nodes/frob.py: No module named 'frobs'\nRuntimeError: Sizes of tensors must match except in dimension 1. Expected size 8 but got size 6 for tensor number 1 in the list.", "sizes-do-not-fit", "shapes"),
    "a None where a path is": (TB + "TypeError: expected str, bytes or os.PathLike object, not NoneType", "none-where-a-value-is-expected", "None"),
    "an argument of another library": ("TypeError: SFTConfig.__init__() got an unexpected keyword argument 'logging_dir'", "keyword-not-taken", "logging_dir"),
    "what replaces a lost name": (TB + "AttributeError: FrobTokenizer has no attribute batch_encode_plus", "attribute-not-in-object", "tokenizer(texts)"),
    "who asks for a lost name": (TB + LIBRARY.format("frob/core.py", "f") + "ImportError: cannot import name 'AutoModelForVision2Seq' from 'transformers'", "name-not-in-module", "pip install -U frob"),
    "a plug-in that asks": (TB + '  File "/ui/custom_nodes/frobs/nodes.py", line 7, in f\n    f(x)\n' + "AttributeError: 'FrobConfig' object has no attribute 'speed'", "attribute-not-in-object", "`frobs` asks for it"),
    "the release that a log names": ("Transformers: 5.1.0\n" + TB + "AttributeError: 'FrobModel' object has no attribute 'speed'", "attribute-not-in-object", "The log names transformers 5.1.0"),
    "an argument that a release lost": (TB + "TypeError: GRPOConfig.__init__() got an unexpected keyword argument 'max_prompt_length'", "keyword-not-taken", "trl 0.28 has it no more"),
    "what is wanted and given": (TB + "FrobError: expected 3 channels, but got 4", "words-expected-got", "wants 3 channels and is given 4"),
    "a variable that is missing": (TB + "FrobError: FROB_HOME is not set", "words-environment-variable", "export FROB_HOME"),
    "a file that a library misses": (TB + LIBRARY.format("frob/core.py", "f") + "FrobError: cannot open weights/frob.safetensors", "words-file", "`weights/frob.safetensors`"),
    "what a library does not support": (TB + LIBRARY.format("frob/core.py", "f") + "FrobError: int3 is not supported yet", "words-not-supported", "`frob` does not support int3"),
    "a kernel of an extension": ("CUDA error (/build/frob/flash_fwd_launch_template.h:192): no kernel image is available for execution on the device", "extension-no-kernel-image", "not torch"),
    "a weight that is gone": (TB + "TypeError: linear(): argument 'weight' (position 2) must be Tensor, not NoneType", "layer-without-weight", "quantized"),
    "an output taken for a tensor": (TB + "AttributeError: 'BaseModelOutputWithPooling' object has no attribute 'norm'", "output-not-a-tensor", "pooler_output"),
    "a release out of range": ("ImportError: frob-hub>=1.5.0,<2.0 is required for a normal functioning\nof this module, but found frob-hub==0.36.2.", "release-out-of-range", "pip install 'frob-hub>=1.5.0,<2.0'"),
    "workers after CUDA": ("RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly\n  CUDA error: initialization error", "cuda-forked", "spawn"),
    "pandas 3": (TB + "TypeError: Invalid value '[1, 2]' for dtype 'str'", "pandas-text-dtype", "astype(object)"),
    "what was closed": (TB + "FrobError: Cannot send a request, as the frob has been closed.", "words-closed", "Keep it open"),
    "what is required": (TB + LIBRARY.format("frob/core.py", "f") + "ValueError: `frob_ids` is required as an input", "words-needs", "`frob` needs"),
    "a kernel's assertion": ("RuntimeError: frob_launcher: Assertion failed: frobs == columns.", "words-value", "Print"),
    "a broadcast output": (TB + "RuntimeError: output with shape [8, 1] doesn't match the broadcast shape [1, 8, 8]", "sizes-do-not-fit", "shapes"),
    "labels that are all masked": ("Unsloth: train_on_responses_only masked every label to -100 in train_dataset, so there is nothing to train on.", "labels-all-masked", "chat template"),
    "an argument that transformers lost": (TB + LIBRARY.format("trl/trainer/sft_trainer.py", "__init__") + "TypeError: Trainer.__init__() got an unexpected keyword argument 'tokenizer'", "keyword-not-taken", "pip install -U trl"),
    "one successor of several": (TB + "ImportError: cannot import name 'AutoModelForVision2Seq' from 'transformers'", "name-not-in-module", "Instead: AutoModelForImageTextToText."),
    "jax beside another library": (TB + "AttributeError: module 'jax.experimental.hijax' has no attribute 'HiPrimitive'", "jax-mismatch", "flax"),
    "an argument whose name is on the next line": ("TypeError: FrobConfig.__init__() got an unexpected keyword argument\n'gamma'. Did you mean 'gama'?", "keyword-not-taken", "Python suggests `gama`"),
    "a name within Python's own words": (TB + "AttributeError: 'FrobConfig' object has no attribute 'num_generations'", "attribute-not-in-object", "`FrobConfig` has no"),
    "a module that is run": ("/opt/env/bin/python: No module named frob.scripts.info", "submodule-not-found", "pip show frob"),
    "an import behind marks": ("❌ [Frob] Critical Import Error: cannot import name 'Frob' from 'frobs.core' (/frobs/core.py)", "name-not-in-module", "frobs.core"),
    "an import over three lines": ("ImportError:\ncannot import name 'Frob'\nfrom frobs.core", "name-not-in-module", "`frobs.core` has no `Frob`"),
    "frames of Colab": ("[/usr/lib/python3.12/dist-packages/frobs/core.py](https://localhost:8080/#) in <module>\n----> 27 from .utils import (\n\nImportError: cannot import name 'Frob' from 'frobs.utils' (/frobs/utils.py)", "name-not-in-module", "Two releases of `frobs` are mixed"),
    "a weight without a place": ("ValueError: There is no module or parameter named 'tower.frob.frob' in FrobForCausalLM", "weight-name-unknown", "`tower.frob.frob`"),
    "the compiler's own line": ("/tmp/frob/main.cpp:800:80: error: cannot convert 'float' to 'const Frob&'", "cxx-compile-failed", "compiler"),
    "the message's own advice": (TB + LIBRARY.format("frob/core.py", "f") + "FrobError: the frob is odd. Restart it with `FROB=1` in its environment.", "unknown-exception", "As it says: Restart it with `FROB=1`"),
    "an advice after a comma": (TB + LIBRARY.format("frob/core.py", "f") + "FrobError: int3 is not supported, please use `frob=4` instead", "words-not-supported", "As it says: use `frob=4` instead"),
    "a hint of torch.compile": (TB + "torch._dynamo.exc.Unsupported: Data-dependent branching\n  Explanation: Detected data-dependent branching.\n  Hint: Use `torch.cond` to express dynamic control flow.", "compile-data-dependent", "As it says: Use `torch.cond`"),
    "an address that is no path": (TB + LIBRARY.format("frob/core.py", "f") + "FrobError: Invalid value in the matrix, an issue at https://github.com/frob/frob/issues", "words-value", "refuses"),
    "a key error with a sentence": (TB + LIBRARY.format("frob/core.py", "f") + "KeyError: 'There is already a frob called speed'", "words-twice", "a second time"),
    "a warning that is raised": ("Traceback (most recent call last):\n  File \"/code/frob.py\", line 9, in check\n    raise DeprecationWarning(\nDeprecationWarning: `frob_len` is no longer supported", "option-removed", "successor"),
    "numbers of ranks in brackets": (TB + "ValueError: frob_parallel_size (8) < world_size (16)", "parallel-sizes", "multiply"),
    "batch keys that are no arguments": (TB + LIBRARY.format("frob/core.py", "f") + "ValueError: Unexpected key in batch 'labels'", "words-value", "refuses"),
    "one GPU count in brackets": (TB + "ValueError: samples (7) and outputs (8) of the frob mismatch", "words-value", "refuses"),
    "trl's vLLM server": (TB + "RuntimeError: The vLLM server at http://a:8000 has no weight-transfer engine. Restart it with `--frob`.", "vllm-server-of-trainer", "As it says: Restart it"),
    "a package and its release": (TB + LIBRARY.format("transformers/q.py", "f") + "ImportError: Using `frob` 4-bit quantization requires frobs: `pip install -U frobs>=0.46.1`", "install-asked-for", "pip install -U 'frobs>=0.46.1'"),
    "a port of accelerate": (TB + "ConnectionError: Tried to launch distributed communication on port `29500`, but another process is utilizing it. Please specify a different port", "address-in-use", "port"),
    "an exception behind a program's words": ("Training failed with error: ValueError: hidden_size must be divisible by num_heads (770 and 12).", "model-sizes-contradict", "multiple"),
    "an exception behind a name and words": ("frob: Failed loading the model: ValueError: hidden_size must be divisible by num_heads (770 and 12).", "model-sizes-contradict", "multiple"),
    "an exception behind a logger's name": ("[ERROR:frob] ValueError: hidden_size must be divisible by num_heads (770 and 12).", "model-sizes-contradict", "multiple"),
    "an exception in bold": ("**ValueError: hidden_size must be divisible by num_heads (770 and 12).**", "model-sizes-contradict", "multiple"),
    "an exception behind a bar": ("Map:   0%|          | 0/100 [00:00<?, ? examples/s]ValueError: hidden_size must be divisible by num_heads (770 and 12).", "model-sizes-contradict", "multiple"),
    "a call's refusal behind words": ("frob inference failed: FrobForCausalLM.infer() got an unexpected keyword argument 'device'", "keyword-not-taken", "`device`"),
    "a missing attribute behind words": ("Error in training: 'NoneType' object has no attribute 'frob'", "none-where-a-value-is-expected", "None"),
    "a module that is not found, in words": ("Module Not Found Error: No module named 'frob'", "module-not-found", "`frob`"),
    "a repr alone": ("ValueError('hidden_size must be divisible by num_heads (770 and 12).')", "model-sizes-contradict", "multiple"),
    "an exception behind Chinese words": ("报错信息：ValueError: hidden_size must be divisible by num_heads (770 and 12).", "model-sizes-contradict", "multiple"),
    "a column that is missing": ("Traceback (most recent call last):\n  File \"/usr/lib/python3.12/site-packages/datasets/formatting/formatting.py\", line 7, in f\n    self.data[key]\nKeyError: 'text'", "column-not-in-dataset", "no column `text`"),
    "a class that does not generate": (TB + "AttributeError: 'FrobForTokenClassification' object has no attribute 'prepare_inputs_for_generation'", "adapter-task-type", "SEQ_CLS"),
    "unsloth's own trainer": ("Traceback (most recent call last):\n  File \"/code/unsloth_compiled_cache/UnslothGRPOTrainer.py\", line 7, in f\n    x * mask\nRuntimeError: The size of tensor a (25) must match the size of tensor b (24) at non-singleton dimension 1", "sizes-do-not-fit", "pip install -U unsloth unsloth_zoo"),
    "another kernel's failure": ("JaxRuntimeError: INTERNAL: Mosaic failed to compile TPU kernel: frob", "mosaic-kernel-failed", "kernel"),
    "an array of all hosts": (TB + "ValueError: device_put's first argument must be a fully addressable array, but got value with devices {TpuDevice(id=0)}", "jax-placed-twice", "make_array_from_process_local_data"),
    "a word in a folder's name": (TB + "FileNotFoundError: Kernel at path `/c/hub/models--frob--flash-attention-3/snapshots/1` does not have one of build variants: torch-cpu", "kernel-without-variant", "without CUDA"),
    "a word in a repository's name": (TB + "FrobError: no rope table in 'frob/flash-attention-3'", "unknown-exception", "no entry"),
    "a word in a repository's name without quotes": (TB + "FrobError: no rope table in frob/flash-attention-3", "unknown-exception", "no entry"),
    "a line that names its own reason": ("Skipping import of cpp extensions due to incompatible torch version 2.9.1\n" + TB + LIBRARY.format("frobtune/core.py", "f") + "ImportError: cannot import name 'int4_weight_only' from 'torchao.quantization'", "name-not-in-module", "torchao<0.16"),
    "a class of diffusers": ("AttributeError: 'Flux2ImageProcessor' object has no attribute 'frob'", "attribute-not-in-object", "install the `diffusers`"),
    "a class of the package that asks": (TB + LIBRARY.format("diffusers/models/auto_model.py", "f") + "AttributeError: type object 'AutoModel' has no attribute 'frob'", "attribute-not-in-object", "Update what `diffusers` is given"),
    "a name of Python's own": (TB + LIBRARY.format("frob/core.py", "f") + "ImportError: cannot import name 'Frob' from 'typing'", "name-not-in-module", "install the Python"),
    "a package that pip calls otherwise": (TB + LIBRARY.format("jax_plugins/xla_cuda12/__init__.py", "f") + "AttributeError: 'Frob' object has no attribute 'frob'", "attribute-not-in-object", "pip install -U 'jax[cuda12]'"),
    "a sum of parallel parts alone": ("world size (4) is not divisible by total_model_size (total_model_size=16)", "parallel-sizes", "switches one off"),
    "a plug-in of another release": ("RuntimeWarning: JAX plugin jax_cuda12_plugin version 0.9.2 is installed, \nbut it is not compatible with the installed jaxlib version 0.9.0.1", "jax-on-the-cpu", "jax[cuda12]"),
    "a compiler's check without its file": ("frob_emitter.cc:584] Check failed: frob.num_sublanes == 0 (1 vs. 0)", "xla-compiler-failed", "offload"),
    "a lost name of JAX": ("ImportError: cannot import name 'xla_pmap_p' from 'jax.extend.core.primitives' (/x/primitives.py)", "jax-mismatch", "jax<0.10.0"),
    "a service that is not resolved": (TB + "ValueError: Failed to resolve distributed service 'frob': none", "words-lacking", "service"),
    "a place that cannot be reached": (TB + "AssertionError: Unreachable!", "assertion-failed", "assertion"),
    "attention of another library": (TB + "ValueError: Flash attention is not supported in numpy backend.", "words-not-supported", "Flash attention"),
    "a backend called Triton": (TB + "NotImplementedError: frob prefetch not implemented in the Triton backend", "words-not-supported", "option"),
    "a mesh of JAX": (TB + "ValueError: mesh should be the same across the entire program. Got mesh shape for one sharding (4,)", "jax-sharding", "NamedSharding"),
    "a number that must be positive": (TB + "ValueError: num_pages must be positive when sizing the cache.", "words-value", "num_pages"),
    "a permission that Google lacks": ("google.api_core.exceptions.Forbidden: 403 GET https://x.y/b/foo: a@b.c does not have storage.buckets.get access to the Google Cloud Storage bucket.", "gcs-rights", "objectAdmin"),
    "the name of JAX's next release": ("TypeError: kernel() got an unexpected keyword argument 'scratch_types'", "keyword-not-taken", "jax>=0.11"),
    "a package of pip's behind a sentence": ("This behaviour is the source of the following dependency conflicts.\nfrob-tpu 2.18 requires libtpu==2.18, but you have libtpu 0.0.21 which is incompatible.\nValueError: frob must be odd", "words-value", "odd"),
    "torchcodec for another CUDA": (CODEC.format("2.11.0+cu128", "OSError: libnvrtc.so.13: cannot open shared object file: No such file"), "torchcodec-other-cuda", "/whl/cu128"),
    "torchcodec for a newer torch": (CODEC.format("2.4.0+cu124", "libavutil.so.60: cannot open shared object file: No such file"), "torchcodec-newer-than-torch", "torch 2.4.0"),
    "torchcodec without FFmpeg": (CODEC.format("2.9.1+cu130", "libavutil.so.60: cannot open shared object file: No such file"), "torchcodec-not-loaded", "apt install ffmpeg"),
    "torchcodec and a symbol": (CODEC.format("2.9.1+cu130", "libtorchcodec_core8.so: undefined symbol: _ZN3c10"), "torchcodec-other-torch", "torch 2.9.1"),
    "a layer that is looked up": (TB + LIBRARY.format("vllm/config/vllm.py", "get_layers") + "KeyError: 'model.layers.0.self_attn.attn'", "layer-name-unknown", "not a weight of the checkpoint"),
    "a package of two releases": (TB + LIBRARY.format("trl/experimental/__init__.py", "<module>") + "ImportError: cannot import name 'TRLExperimentalWarning' from 'trl.import_utils' (/x/trl/import_utils.py)", "name-not-in-module", "--force-reinstall trl"),
    "an extension's last frame": (TB + LIBRARY.format("flex_gemm/ops/conv.py", "f").replace("f(x)", "kernels.cuda.neighbor_map(x)") + "RuntimeError: CUDA error: no kernel image is available for execution on the device", "extension-no-kernel-image", "of `flex_gemm`"),
    "ComfyUI's words for memory": ("!!! Exception during processing !!! Allocation on device\n" + TB, "cuda-oom", "--lowvram"),
    "memory with its figures": ("Sampler: sampling failed (OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 29.60 GiB\nRequested               : 128.91 MiB\nDevice limit            : 31.36 GiB\nFree (according to CUDA): 28.69 MiB", "cuda-oom", "Requested: 129 MiB; free: 29 MiB"),
    "a file that is newer": ("ValueError: Unknown tensor type in GGUF file, expected one of F16, Q8_0 but got 'MXFP4'", "file-newer-than-reader", "'MXFP4'"),
    "files to be placed": ("RuntimeError:\nDownload failed.\n\nPlease manually place the model files at:\n  /models/frob\n\nDownload error: An error happened while trying to locate the file on the Hub and we cannot find the requested files in the local cache.", "files-to-place", "Place the files"),
    "a rule before an advice": (TB + LIBRARY.format("frob/core.py", "f") + "AssertionError: speed must be a number. If you need to pass a list, call frobs()", "words-value", "speed must be a number"),
    "a type of another release": (TB + "RuntimeError: Unexpected template output type: <class 'transformers.tokenization_utils_base.BatchEncoding'>", "type-of-another-release", "install the `transformers`"),
    "a variable's method": (TB + LIBRARY.format("flax/nnx/variablelib.py", "__getattr__") + "AttributeError: 'jaxlib._jax.ArrayImpl' object has no attribute 'set_value'", "nnx-variable-within", "-U flax"),
    "a placeholder": (TB + LIBRARY.format("mujoco/mjx/io.py", "f").replace("f(x)", "getattr(types.GraphMode, 'WARP')") + "AttributeError: type object 'int' has no attribute 'WARP'", "optional-import-placeholder", "pip install -U mujoco"),
    "Triton on Windows": (TB.replace("/code/train.py", r"I:\ComfyUI\nodes\rms.py") + "ModuleNotFoundError: No module named 'triton'", "triton-not-installed", "triton-windows"),
    "an option without its sign": (TB.replace("run()", 'key, value = arg.split("=")') + "ValueError: not enough values to unpack (expected 2, got 1)", "text-without-separator", "key=value"),
    "Warp's package": ("ModuleNotFoundError: No module named 'chronos'", "module-of-another-name", "chronos-forecasting"),
    "a stuck collective": ("F0101 10:00:00.000000    12 rendezvous.cc:127] Termination timeout for `all reduce RendezvousKey{run_id=1}` of 40 seconds exceeded. Exiting to ensure a consistent program state.", "xla-stuck-collective", "rank"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_first_answer(case):
    log, id, word = CASES[case]
    first = explained(log)[0]
    assert (first.id, first.role) == (id, "cause"), [(e.id, e.role) for e in explained(log)]
    assert word in f"{first.cause} {first.fix}"


FAMILIES = {
    "numpy-alias": ["AttributeError: module 'numpy' has no attribute 'int'.", "AttributeError: module 'numpy' has no attribute 'float'. Did you mean: 'cfloat'?", "AttributeError: `np.float_` was removed in the NumPy 2.0 release. Use `np.float64` instead."],
    "numpy-integer-range": ["OverflowError: Python integer -1 out of bounds for uint32"],
    "numpy-pickled-array": ["ValueError: Cannot load file containing pickled data when allow_pickle=False"],
    "text-in-tensor": ["TypeError: new(): invalid data type 'str'"],
    "classes-too-few": ["ValueError: The least populated class in y has only 1 member, which is too few. The minimum number of groups for any class cannot be less than 2."],
    "metric-of-another-kind": ["ValueError: Target is multiclass but average='binary'. Please choose another average setting, one of [None, 'micro', 'macro', 'weighted']."],
    "pandas-columns-missing": ["KeyError: \"None of [Index(['image_id', 'label'], dtype='object')] are in the [columns]\""],
    "image-mode": ["TypeError: Invalid shape (3, 224, 224) for image data", "TypeError: Cannot handle this data type: (1, 1, 3), <f4"],
    "no-display": ["_tkinter.TclError: no display name and no $DISPLAY environment variable", "ImportError: Cannot load backend 'TkAgg' which requires the 'tk' interactive framework, as 'headless' is currently running"],
    "system-library-missing": ["ImportError: libxcb.so.1: cannot open shared object file: No such file or directory", "ImportError: libGLU.so.1: cannot open shared object file: No such file or directory", "ImportError: libgthread-2.0.so.0: cannot open shared object file: No such file or directory"],
    "dataset-not-downloaded": ["RuntimeError: Dataset not found. You can use download=True to download it", "RuntimeError: invalid hash value (expected \"f37072fd\", got \"e3b0c442...\")", "RuntimeError: Dataset not found or corrupted. You can use download=True to download it"],
    "package-asked-for": ["ImportError: 'NeighborSampler' requires either 'pyg-lib' or 'torch-sparse'", "ImportError: TensorBoard logging requires TensorBoard version 1.15 or above", "ImportError: Missing optional dependency 'openpyxl'.  Use pip or conda to install openpyxl."],
    "estimator-tags": ["AttributeError: 'super' object has no attribute '_validate_data'", "AttributeError: 'IForest' object has no attribute '__sklearn_tags__'"],
    "pillow-ten": ["AttributeError: 'FreeTypeFont' object has no attribute 'getsize'"],
    "dataset-without-length": ["TypeError: object of type 'MyDataset' has no len()"],
    "number-out-of-range": ["RuntimeError: value cannot be converted to type int64_t without overflow"],
    "image-not-divisible": ["ValueError: Backbone requires input shape to be divisible by 56, but got torch.Size([1, 3, 640, 640])"],
    "float-as-integer": ["TypeError: 'float' object cannot be interpreted as an integer", "TypeError: slice indices must be integers or None or have an __index__ method"],
    "annotations-of-newer-python": ["TypeError: unsupported operand type(s) for |: 'type' and 'NoneType'"],
    "pickle-of-another-python": ["TypeError: code() argument 13 must be str, not int"],
    "pandas-text-among-numbers": ["TypeError: agg function failed [how->mean,dtype->object]", "TypeError: Cannot perform reduction 'mean' with string dtype"],
    "date-format": ["ValueError: time data \"13/01/2024\" doesn't match format \"%m/%d/%Y\", at position 12. You might want to try:"],
    "loss-not-a-tensor": ["AttributeError: 'tuple' object has no attribute 'backward'", "AttributeError: 'float' object has no attribute 'backward'"],
    "batch-not-a-tensor": ["AttributeError: 'dict' object has no attribute 'to'", "AttributeError: 'tuple' object has no attribute 'to'"],
    "array-or-tensor": ["AttributeError: 'Tensor' object has no attribute 'append'", "AttributeError: 'numpy.ndarray' object has no attribute 'to'"],
    "loader-or-subset": ["AttributeError: 'Subset' object has no attribute 'classes'"],
    "class-folders-missing": ["RuntimeError: Found 0 files in subfolders of: data/train", "FileNotFoundError: Couldn't find any class folder in data/train."],
    "image-too-large": ["PIL.Image.DecompressionBombError: Image size (225705984 pixels) exceeds limit of 178956970 pixels, could be decompression bomb DOS attack."],
    "module-init-missing": ["AttributeError: cannot assign module before Module.__init__() call"],
    "forward-missing": ["NotImplementedError: Module [ModuleList] is missing the required \"forward\" function"],
    "state-dict-as-model": ["TypeError: Expected state_dict to be dict-like, got <class '__main__.Net'>."],
    "module-name-taken": ["KeyError: 'module name can\\'t contain \".\", got: layer1.conv'"],
    "arguments-of-other-types": ["TypeError: randint() received an invalid combination of arguments - got (int, numpy.int64, size=tuple), but expected one of:"],
    "input-dtype": ["RuntimeError: expected scalar type Float but found Double", "RuntimeError: mat1 and mat2 must have the same dtype, but got Double and Float", "RuntimeError: expected m1 and m2 to have the same dtype, but got: double != float"],
    "optimizer-parameters-wrong": ["ValueError: some parameters appear in more than one parameter group", "TypeError: optimizer can only optimize Tensors, but one of the params is Module.parameters", "TypeError: params argument given to the optimizer should be an iterable of Tensors or dicts, but got torch.FloatTensor"],
    "optimizer-setting": ["ValueError: Invalid beta parameter at index 0: 1.0"],
    "scheduler-misused": ["ValueError: Tried to step 1002 times. The specified number of total steps is 1000", "TypeError: ReduceLROnPlateau.step() missing 1 required positional argument: 'metrics'", "ValueError: optimizer must support momentum or beta1 with `cycle_momentum` option enabled"],
    "optimizer-state-on-device": ["ValueError: lr as a Tensor is not supported for capturable=False and foreach=True"],
    "dataloader-options": ["ValueError: sampler option is mutually exclusive with shuffle", "ValueError: DataLoader with IterableDataset: expected unspecified shuffle option, but got shuffle=True"],
    "generator-device": ["RuntimeError: Expected a 'cpu' device type for generator but found 'cuda'"],
    "device-name-unknown": ["RuntimeError: User specified an unsupported autocast device_type 'gpu'"],
    "tensor-beyond-32-bits": ["RuntimeError: canUse32BitIndexMath(input) && canUse32BitIndexMath(output) INTERNAL ASSERT FAILED", "RuntimeError: nonzero is not supported for tensors with more than INT_MAX elements, file a support request"],
    "start-method-set": ["RuntimeError: Error: cannot set number of interop threads after parallel work has started or set_num_interop_threads called"],
    "torchscript-refuses": ["torch.jit.frontend.NotSupportedError: Compiled functions can't take variable number of arguments or use keyword-only arguments with defaults:"],
    "sequence-lengths": ["RuntimeError: Expected input_lengths to have value at most 50, but got value 60", "RuntimeError: 'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor", "RuntimeError: Length of all samples has to be greater than 0, but found an element in 'lengths' that is <= 0"],
    "detection-targets": ["AssertionError: Expected target boxes to be a tensor of shape [N, 4], got torch.Size([0]).", "ValueError: All bounding boxes should have positive height and width. Found invalid box [10.0, 20.0, 10.0, 40.0] for target at index 0."],
    "model-name-unknown": ["RuntimeError: Unknown model (vit_base_patch16_224_dino)", "RuntimeError: Model config for ViT-L-16-SigLIP2-256 not found.", "RuntimeError: No pretrained weights exist for vit_tiny_r_s16_p8. Use `pretrained=False` for random init."],
    "lightning-method-missing": ["lightning.fabric.utilities.exceptions.MisconfigurationException: No `train_dataloader()` method defined to run `Trainer.fit`."],
    "metric-inputs": ["ValueError: Expected argument `num_classes` to be an integer larger than 1, but got None", "RuntimeError: Detected the following values in `target`: tensor([0, 2]) but expected only the following values [0, 1].", "ValueError: Either `preds` and `target` both should have the (same) shape (N, ...), or `target` should be (N, ...) and `preds` should be (N, C, ...)."],
    "environment-not-registered": ["gymnasium.error.NamespaceNotFound: Namespace ALE not found. Have you installed the proper package for ALE?", "gymnasium.error.DeprecatedEnv: Environment version v2 for `LunarLander` is deprecated. Please use `LunarLander-v3` instead."],
    "observation-space-differs": ["ValueError: Observation ([ 0.1 nan] dtype=float32) outside given space (Box(-1.0, 1.0, (2,), float32))!", "ValueError: Error: Unexpected observation shape (4,) for Box environment, please use (2,) or (n_env, 2) for the observation shape."],
    "dataclass-mutable-default": ["ValueError: mutable default <class 'fairseq.dataclass.configs.CommonConfig'> for field common is not allowed: use default_factory"],
    "compile-python-too-new": ["RuntimeError: torch.compile is not supported on Python 3.14+"],
    "environment-reset-seed": ["TypeError: The reset() method must accept a `seed` parameter"],
    "optimizer-state-key": ["KeyError: 'exp_avg'"],
    "libuv-not-built": ["RuntimeError: use_libuv was requested but PyTorch was built without libuv support"],
    "layer-of-another-torch": ["AttributeError: 'Conv2d' object has no attribute 'padding_mode'", "AttributeError: 'BatchNorm2d' object has no attribute 'track_running_stats'", "AttributeError: 'Upsample' object has no attribute 'recompute_scale_factor'"],
    "operand-on-another-device": ["RuntimeError: expected condition, x and y to be on the same device, but condition is on cuda:0 and x and y are on cpu and cuda:0 respectively"],
    "relative-import": ["ImportError: attempted relative import with no known parent package"],
    "drive-not-mounted": ["ValueError: Mountpoint must not already contain files", "MessageError: Error: credential propagation was unsuccessful"],
    "save-folder-missing": ["RuntimeError: File checkpoints/epoch:1.pt cannot be opened."],
    "windows-path-in-string": ["SyntaxError: (unicode error) 'unicodeescape' codec can't decode bytes in position 2-3: truncated \\UXXXXXXXX escape"],
    "setuptools-of-another-time": ["AttributeError: install_layout. Did you mean: 'install_platlib'?"],
    "library-load-refused": ["ImportError: libctranslate2-d3638643.so.4.4.0: cannot enable executable stack as shared object requires: Invalid argument"],
    "git-refused": ["fatal: could not read Username for 'https://github.com': No such device or address", "batch response: This repository exceeded its LFS budget. The account responsible for the budget should increase it to restore access."],
    "numba-numpy": ["SystemError: initialization of _internal failed without raising an exception"],
    "base-package-old": ["TypeError: Client.__init__() got an unexpected keyword argument 'proxies'", "AttributeError: module 'lib' has no attribute 'X509_V_FLAG_NOTIFY_POLICY'"],
    "option-value-invalid": ["train.py: error: argument --lr: invalid float value: 'auto'"],
    "module-of-another-name": ["ModuleNotFoundError: No module named 'PIL'", "ModuleNotFoundError: No module named 'yaml'", "ModuleNotFoundError: No module named 'skimage'"],
    "own-module-not-found": ["ModuleNotFoundError: No module named 'utils.datasets'; 'utils' is not a package"],
    "program-not-installed": ["FileNotFoundError: [Errno 2] No such file or directory: 'ffmpeg'", "FileNotFoundError: [Errno 2] No such file or directory: 'nvidia-smi'"],
    "pip-input-wrong": ["error: Multiple top-level packages discovered in a flat-layout: ['data', 'models'].", "ERROR: Directory '.' is not installable. Neither 'setup.py' nor 'pyproject.toml' found.", "ERROR: Could not open requirements file: [Errno 2] No such file or directory: 'requirements.txt'"],
    "hub-entry-missing": ["RuntimeError: Cannot find callable vit_base_patch16_siglip_224.webli in hubconf"],
    "image-codec-missing": ["RuntimeError: image::decode_image: decode_jpeg: torchvision not compiled with libjpeg support"],
    "folder-hides-package": ["AttributeError: partially initialized module 'wandb' has no attribute 'init' (most likely due to a circular import)"],
    "compiled-part-missing": ["ModuleNotFoundError: No module named 'pytorch3d._C'", "ModuleNotFoundError: No module named 'MultiScaleDeformableAttention'", "AttributeError: 'NoneType' object has no attribute 'CameraModelType'"],
    "package-of-the-same-name": ["AttributeError: module 'esm' has no attribute 'pretrained'"],
    "missing-value-as-float": ["TypeError: argument of type 'float' is not iterable", "TypeError: expected string or bytes-like object, got 'float'", 'TypeError: can only concatenate str (not "float") to str'],
    "jax-backend-unknown": ["RuntimeError: Unknown backend rocm. Available backends are ['cpu']", "RuntimeError: Unable to initialize backend 'rocm': Backend 'rocm' is not in the list of known backends: ['cpu', 'tpu']."],
    "command-not-found": ["[Frob] ERROR: uv installed but executable not found"],
    "shared-library-missing": ["Error loading onnxruntime_providers_cuda.dll: cublasLt64_13.dll is missing"],
    "cuda-no-driver": ["RuntimeError: PyTorch is not able to access CUDA"],
    "path-of-another-system": ["NotImplementedError: cannot instantiate 'WindowsPath' on your system"],
    "numpy-abi": ["ValueError: numpy.dtype size changed, may indicate binary incompatibility. Expected 88 from C header, got 96 from PyObject"],
    "different-dtypes": ["RuntimeError: Expected A.dtype() == at::kBFloat16 to be true, but got false.", "RuntimeError: Expected out tensor to have dtype c10::BFloat16, but got float instead", "RuntimeError: expected dtype float for `end` but got dtype c10::BFloat16"],
    "rope-parameters": ["ValueError: Unknown RoPE scaling type default", "KeyError: 'original_max_position_embeddings'"],
    "left-transformers-four": ["AttributeError: 'NomicBertModel' object has no attribute 'get_extended_attention_mask'", "AttributeError: 'BertModel' object has no attribute 'get_head_mask'"],
    "triton-of-another-torch": ["AttributeError: module 'triton.language' has no attribute 'constexpr_function'"],
    "file-version-newer": ["RuntimeError: the checkpoint is using version 14, while the current version is 11; and trying to upgrade the checkpoint failed."],
    "value-not-valid": ["ValueError: Invalid repo name: foo--bar."],
    "post-init-missing": ["Error running job: 'BiRefNet' object has no attribute 'all_tied_weights_keys'"],
    "mlx-weights-do-not-fit": ["ValueError: Missing 2 parameters:\nprojector.layer_norm.bias."],
    "rsl-rl-config-of-another-release": ["AttributeError: 'PPO' object has no attribute 'actor_critic'", "AttributeError: 'Go2PPORunnerCfg' object has no attribute 'clip_actions'."],
    "comfyui-of-another-release": ["ImportError: cannot import name 'ui' from 'comfy_api.latest' (/ComfyUI/comfy_api/latest/__init__.py)", "ModuleNotFoundError: No module named 'comfy.ldm.frob'"],
    "workflow-file-missing": ["  - Value not in list: ckpt_name: 'v1-5.ckpt' not in ['sd_xl.safetensors']"],
    "rocm-architecture": ["AcceleratorError: HIP error: device kernel image is invalid"],
    "gguf-tensors-differ": ["llama_model_load: error loading model: check_tensor_dims: tensor 'token_embd.weight' has wrong shape; expected 2560, 151936, got 2560, 248320"],
    "file-newer-than-reader": ["ValueError: Unexpected text model architecture type in GGUF file: 'qwen3vl'"],
    "config-value-invalid": ["pydantic_core._pydantic_core.ValidationError: 1 validation error for FrobConfig\n  Value error, frobs must be even [type=value_error, input_value=3, input_type=int]"],
    "words-file": ["ValueError: string is not a file: `C:\\ComfyUI\\output\\tower.glb`"],
    "name-not-known": ["KeyError: 'optimizer frobnicator is not registered'", "ValueError: Unrecognized schedule `frob_2`"],
    "msvc-not-found": ["  running build_ext\n  error: [WinError 2] The system cannot find the file specified"],
    "cxx-compile-failed": ["3 errors detected in the compilation of \"gsplat/cuda/csrc/rasterization.cu\"."],
    "weight-name-unknown": ["Lora 'a.safetensors' contains unexpected module keys, it is likely that this Lora is for a different model : '['base_m...", "KeyError: 'model.layers.0.self_attn.qkv_proj.weight_scale'", "KeyError: 'language_model.lm_head.weight'"],
    "package-version-refused": ["WARNING: Torch 2.9 is not supported. Supported: 2.8", "CUDA 13.0 is not supported. Supported versions: 12.6, 12.8"],
    "submodule-not-found": ["2025-12-31T14:22:24.886274 - !!! Exception during processing !!! No module named 'diffusers.models.frob'", "### ModuleNotFoundError: No module named 'diffusers.frob'"],
    "module-not-found": ["### Error: No module named 'frobs'", "## ERROR: No module named 'frobs'"],
    "compiler-gpu-architecture": ["Reason: PTX version 8.8 does not support target 'sm_107a'.", "ptxas-blackwell fatal   : Value 'sm_110a' is not defined for option 'gpu-name'"],
    "wrapper-lacks-attribute": ["AttributeError: 'AutoModelForSeq2SeqLMWithValueHead' object has no attribute 'add_model_tags'", "AttributeError: 'OVModelForCausalLM' object has no attribute 'named_parameters'"],
    "cuda-python-missing": ["ModuleNotFoundError: No module named 'cuda.bindings'", "ModuleNotFoundError: No module named 'cutlass.cute'"],
    "triton-kernel-refused": ['loc("/code/kernels.py":12:4): error: failed to legalize the operation'],
    "device-mesh-dimension": ["ValueError: Mesh dimension 'tp' does not exist"],
    "argparse-checks-help": [TB + '  File "/usr/lib/python3.14/argparse.py", line 1751, in _check_help\n    raise ValueError("badly formed help string") from exc\nValueError: badly formed help string'],
    "cuda-libraries-mixed": ["OSError: /opt/lib/libcublas.so.11: symbol cublasLtGetStatusString version libcublasLt.so.11 not defined in file libcublasLt.so.11 with link time reference"],
}  # fmt: skip
"""Further texts of an entry's family, each of which it must explain first."""


@pytest.mark.parametrize("id", FAMILIES)
def test_family(id):
    found = {text: [e.id for e in explained(text)][:1] for text in FAMILIES[id]}
    assert found == {text: [id] for text in FAMILIES[id]}


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("SyntaxError: invalid syntax", "syntax-error"),
        ("ValueError: Unknown error while the file was read", "words-value"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'a.json'", "file-not-found"),
        ("RuntimeError: /frob/csrc/launch.cc:196: Check failed: n > 0 (0 vs. 0) is missing", "words-value"),
        ("KeyError: 'frob'", "key-missing"),
        ("ValueError: Unknown optimizer: muon", "name-not-known"),
        ("ValueError: The read timeout must be a positive integer.", "words-value"),
        ("AttributeError: 'Frob' object has no attribute 'prune_frobs'", "attribute-not-in-object"),
        ("AttributeError: 'float' object has no attribute 'to'", "attribute-of-plain-value"),
        ("AttributeError: 'State' object has no attribute 'pos'", "attribute-not-in-object"),
        ("RuntimeError: The 'data' object was created by an older version of PyG. If this error occurred while loading an already existing dataset, remove the 'processed/' directory", "graph-data-old"),
        ("NotImplementedError: Could not run 'aten::frob' with arguments from the 'CUDA' backend", "operator-without-backend"),
        ("ValueError: fp16 mixed precision requires a GPU (not 'xla')", "fp16-on-xla"),
        ("AttributeError: 'NoneType' object has no attribute 'config'", "none-where-a-value-is-expected"),
        ("KeyError: 'labels'", "key-missing"),
        ("KeyError: 'BATCH_SIZE'", "key-missing"),
        ("RuntimeError: FFmpeg is not installed", "words-needs"),
        ("ImportError: cannot import name 'vllm_ops' from 'vllm._C'", "name-not-in-module"),
        ("RuntimeError: mat1 and mat2 must have the same dtype, but got Half and Float", "different-dtypes"),
        ("UnicodeDecodeError: 'gbk' codec can't decode byte 0xa6 in position 4: illegal multibyte sequence", "console-encoding"),
        ("TypeError: Frob.run() takes 2 positional arguments but 3 were given", "argument-missing"),
        ("ModuleNotFoundError: No module named 'frobs'", "module-not-found"),
        ("ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory", "shared-library-missing"),
        ("KeyError: 'layers.0.mlp.experts.w13_weight'", "weight-name-unknown"),
        ("KeyError: 'observation.images.rgb.left_wrist'", "key-missing"),
        ("OpError: cannot convert <class 'int'> to numer and denom", "words-value"),
        ("AttributeError: 'PeftModel' object has no attribute 'speed'", "attribute-not-in-object"),
        (TB + "RuntimeError: The size of tensor a (9) must match the size of tensor b (8) at non-singleton dimension 2", "sizes-do-not-fit"),
        (TB + '  File "/code/a.py", line 9, in <module>\n    from isaacsim.core import World\nModuleNotFoundError: No module named \'isaacsim\'', "isaac-module-before-app"),
        ("ValueError: not enough values to unpack (expected 2, got 1)", "values-not-unpacked"),
        ("AttributeError: type object 'Frob' has no attribute 'WARP'", "attribute-not-in-object"),
        ("AttributeError: type object 'int' has no attribute 'speed'", "attribute-not-in-object"),
        ("TypeError: Unexpected value type: <class 'numpy.ndarray'>", "words-value"),
        ("AttributeError: 'jaxlib._jax.ArrayImpl' object has no attribute 'speed'", "jax-array-attribute"),
        ("RuntimeError: frob must be odd. You need to pass an odd one", "words-needs"),
        (TB + LIBRARY.format("transformers/models/frob.py", "f").replace("f(x)", "torch.arange(9)") + "RuntimeError: CUDA error: no kernel image is available for execution on the device", "cuda-no-kernel-image"),
        ("RuntimeError: Failed. Set env var HYDRA_FULL_ERROR=1 to see more", "unknown-exception"),
        ("google.api_core.exceptions.Forbidden: 403 GET https://storage.googleapis.com/storage/v1/b/frob: no access", "service-credentials"),
    ],
)  # fmt: skip
def test_a_text_that_only_looks_like_a_family(text, id):
    assert explained(text)[0].id == id


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("AttributeError: 'DataFrame' object has no attribute 'append'", "Instead: pd.concat"),
        ("ImportError: cannot import name 'simps' from 'scipy.integrate'", "Instead: simpson"),
        ("TypeError: XGBModel.fit() got an unexpected keyword argument 'early_stopping_rounds'", "xgboost 2.1 has it no more"),
        ("AttributeError: module 'torch.library' has no attribute 'register_fake'", "since torch 2.4"),
        ("TypeError: OneHotEncoder.__init__() got an unexpected keyword argument 'sparse'", "sklearn 1.4 has it no more"),
        ("ModuleNotFoundError: No module named 'torchvision.transforms.functional_tensor'", "torchvision 0.17 has it no more"),
        ("AttributeError: 'LitModel' object has no attribute 'speed'", "install the release"),
        ("AttributeError: type object 'frob._enums.Mode' has no attribute 'FAST'", "install the `frob` that it was written for"),
        ("ModuleNotFoundError: No module named 'faiss'", "`python -m pip install faiss-cpu`"),
        ("ValueError: --frob requires a newer GPU", "With `--frob` the program needs a newer GPU"),
        (KEYS.format("model.", "model.", "", "", ""), "differ by the prefix `model.`, which those of the file lack"),
        (KEYS.format("", "", ', "a.b.c"' * 60, "_orig_mod.", "_orig_mod."), "Strip `_orig_mod.`"),
        (KEYS.format("enc.layers.1.", "enc.layers.2.", "", "", ""), "these are another model's weights".capitalize()),
        ("ImportError: cannot import name 'is_offline_mode' from 'huggingface_hub'", "'huggingface_hub>=1.2'` (then `pip check`)"),
        ("ptxas-blackwell fatal   : Value 'sm_110a' is not defined for option 'gpu-name'", "`TRITON_PTXAS_BLACKWELL_PATH`"),
        ("Unsupported global: GLOBAL a.B was not an allowed global by default. weights_only", "add_safe_globals([a.B])`"),
        ("_pickle.UnpicklingError: Weights only load failed. This file can", "add_safe_globals([...])`"),
        ("Ran out of memory in memory space vmem. Used 65.05M of 64.00M vmem.", "a higher limit than 64.00M"),
        ("E1 cuda_dnn.cc:456] Loaded runtime CuDNN library: 9.1.1 but source was compiled with: 9.8.0.", "at least 9.8.0"),
        ("WARNING: Torch 2.9 is not supported. Supported: 2.8", "Install Torch 2.8"),
    ],
)  # fmt: skip
def test_names_of_general_libraries(text, said):
    first = explained(text)[0]
    assert said in f"{first.cause} {first.fix}"


@pytest.mark.parametrize(
    ("message", "id"),
    [("ImportError: flash-attn is not installed. Please install it, e.g., `pip install flash-attn`.", "flash-attention-rejected"),
     ("ValueError: Triton needs to be installed to use frob's kernels", "triton-failed"),
     ("AssertionError: Triton sparse frob requires d_v divisible by 128, got 8", "triton-failed"),
     ("RuntimeError: Cannot find CUTLASS headers required for JIT compilation. Please install flashinfer", "kernel-refuses"),
     ("RuntimeError: use_te_rng_tracker requires TransformerEngine version >= 1.5", "kernel-refuses"),
     ("ValueError: --enable-frob requires tp_size > 1: there is no sequence to shard across a single TP rank.", "spmd-failed")],
)  # fmt: skip
def test_what_is_needed_for_a_kernel_is_not_a_kernel_that_failed(message, id):
    first = explained(TB + LIBRARY.format("frob/core.py", "f") + message)[0]
    assert first.id != id and first.role == "cause"


@pytest.mark.parametrize(
    "log",
    ["A matching Triton is not available, some optimizations will not be enabled.\n"
     "Error caught was: No module named 'triton'",
     "WARNING: Could not import frobs: No module named 'frobs'",
     "Found GPU0 NVIDIA GB10 which is of cuda capability 12.1.\nMinimum and Maximum cuda capability "
     "supported by this version of PyTorch is (8.0) - (12.0)\nstep 1 loss 2.0",
     "Failed to import frob: ValueError: odd thing here, falling back to eager\nstep 1 loss 2.0",
     "* [bugfix] Fix failing test: RuntimeError: frob is odd", "fix: error on load: ValueError: frob",
     "You may see an error: RuntimeError: frob is odd", "errors: ValueError: 3 of 40 files",
     "[W1102 03:11:22.1 socket.cpp:755] [c10d] The client socket has failed to connect to [node11]:29500"
     " (errno: 111 - Connection refused).\n[rank0]: NCCL version 2.27.5\nepoch 1 loss 0.2",
     "frob 4.5 requires hub<1.0, but you have hub 1.0.0 which is incompatible.\nstep 1 loss 2.0",
     "To use it, place the model files in /models/frob.\nstep 1 loss 2.0",
     "An NVIDIA GPU may be present on this machine, but a CUDA-enabled jaxlib is not installed. "
     "Falling back to cpu.\nstep 1 loss 2.0"],
)  # fmt: skip
def test_what_a_program_lives_without_is_no_cause(log):
    assert causes(log) == []


def test_an_exception_of_a_library_is_explained_by_where_it_comes_from():
    imported = TB + LIBRARY.format("frob/__init__.py", "<module>") + "FrobError: too old"
    first = explained(imported)[0]
    assert (
        "`frob` raised it while it was imported" in first.cause
        and "one small batch" not in first.fix
    )
    called = explained(TB + LIBRARY.format("frob/core.py", "check") + "FrobError: too odd")[0]
    assert (
        "`frob` (core.py:7) refuses what train.py:3 gives" in called.cause
        and "train.py:3" in called.fix
    )
    assert "print the values" in explained(TB + "FrobError: too odd")[0].fix


def test_only_a_text_with_one_cause_is_certain():
    sure = {entry.id for entry in known_errors() if entry.is_certain}
    assert {"unscale-fp16-gradients", "fp16-on-xla"} <= sure
    assert not {"nccl-remote-error", "cuda-no-driver", "package-build-failed"} & sure


def test_a_symptom_alone_is_the_cause_and_a_launchers_report_is_not():
    assert causes("Segmentation fault (core dumped)") == ["segmentation-fault"]
    assert causes("Sending process 12 closing signal SIGTERM") == []
    assert causes("Segmentation fault (core dumped)\n" + TB + "KeyError: 'a'") == ["key-missing"]


@pytest.mark.parametrize(
    ("log", "has_error"),
    [("step 1 loss 2.0\nstep 2 loss 1.9\n0 errors, 2 steps", False), ("step 1\nerror: frob it", True),
     (TB + "FrobError: odd", True), ("Exception ignored in: <generator f at 0x1>\n" + TB + "FrobError: odd", False), ("UserWarning: frob is deprecated", False)],
)  # fmt: skip
def test_an_error_is_seen_or_not(tmp_path, log, has_error):
    path = tmp_path / "log"
    path.write_text(log)
    assert explain_log(open_log(str(path), 20.0), known_errors()).has_error == has_error


def test_your_line_is_named_where_only_the_outer_exception_shows_it():
    inner = TB.replace("/code/train.py", "/usr/lib/python3.12/site-packages/frob/core.py")
    link = "\nThe above exception was the direct cause of the following exception:\n\n"
    first = explained(f"{inner}KeyError: 'speed'\n{link}{TB}KeyError: 'speed'")[0]
    assert "Raised at /code/train.py, line 3" in first.cause
