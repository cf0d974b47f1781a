/* A CUDA device that is not there: the parts of libcudart and libcuda that torch calls, over the host's memory.
 *
 *     torch's own host code (allocator, dispatcher, autograd)      tests/cuda_device/operators.py
 *          │ cudaMalloc, cudaMemcpyAsync, ...   │ a kernel                   │ the values that the kernel would have written
 *          ▼                                    ▼                            ▼
 *     mmap within the device's size      counted, not run      ◄──  the CPU's operator, over the same memory
 *
 * Copies and sets are real; streams and events are immediate, but for copies of side streams if SIMULATED_COPIES says so (see there). A kernel is accepted only while operators.py says that it will write its
 * results (simulated_enter); any other launch is an error, so nothing reads memory that a kernel should have written.
 * Preloaded, these symbols come before those of NVIDIA's libraries. What torch links and nothing here defines is stubbed (build.py).
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define API __attribute__((visibility("default")))
#define MOST_DEVICES 8
#define PAGE (2ull << 20) /* the driver gives device memory in pages of 2 MiB */

/* ---------------------------------------------------------------- settings */

static int devices, major, minor;
static enum { NOW, LATE, EARLY } copies; /* when copies of side streams between host and device happen */
static size_t memory, context; /* of each device, and what a process takes of it before its first block */

static size_t setting(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

__attribute__((constructor)) static void read_settings(void) {
    devices = (int)setting("SIMULATED_DEVICES", 1);
    if (devices > MOST_DEVICES) devices = MOST_DEVICES;
    memory = setting("SIMULATED_MEMORY", 80ull << 30) / PAGE * PAGE;
    context = setting("SIMULATED_CONTEXT", 512ull << 20);
    const char *when = getenv("SIMULATED_COPIES");
    copies = when && !strcmp(when, "late") ? LATE : when && !strcmp(when, "early") ? EARLY : NOW;
    const char *capability = getenv("SIMULATED_CAPABILITY");
    if (!capability || sscanf(capability, "%d.%d", &major, &minor) != 2) major = 8, minor = 0;
    setenv("TORCH_CUDNN_V8_API_DISABLED", "1", 0); /* the older interface to convolutions is a handful of functions */
}

/* ---------------------------------------------------------------- errors, operators, devices */

static __thread cudaError_t last_error;
static __thread char refusal[512]; /* what the last error was about */
static __thread int current, inside, may_read;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t used[MOST_DEVICES];
static int has_context[MOST_DEVICES];

static cudaError_t fail(cudaError_t error) {
    refusal[0] = 0;
    return last_error = error;
}

/* Also for stubs of libraries. */
int simulated_refuse(const char *what) {
    snprintf(refusal, sizeof refusal, "the simulated device has no rule for %s: see tests/cuda_device/operators.py", what);
    fprintf(stderr, "%s\n", refusal);
    return last_error = cudaErrorNotSupported;
}

/* An operator of which operators.py will write the results; reading others' results from the device would read what no kernel wrote. */
API int simulated_enter(int reads) {
    if (inside) return 0;
    may_read = reads;
    return inside = 1;
}
API void simulated_leave(void) { inside = 0; }
API int simulated_inside(void) { return inside; }

static void make_context(int device) { /* with the lock held */
    if (has_context[device]) return;
    has_context[device] = 1;
    used[device] += context;
}

/* What other processes take of a device, from now on; with what this one has, it may be more than there is. */
API void simulated_others(int device, size_t bytes) {
    static size_t others[MOST_DEVICES];
    pthread_mutex_lock(&lock);
    used[device] += bytes - others[device];
    others[device] = bytes;
    pthread_mutex_unlock(&lock);
}

API cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
API cudaError_t cudaPeekAtLastError(void) { return last_error; }
API const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorNotSupported: return refusal[0] ? refusal : "operation not supported";
        default: return "an error of the simulated device";
    }
}
API const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

API cudaError_t cudaGetDeviceCount(int *count) {
    *count = devices;
    return devices ? cudaSuccess : fail(cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int *device) { return *device = current, cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= devices) return fail(cudaErrorInvalidDevice);
    current = device;
    pthread_mutex_lock(&lock);
    make_context(device);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) { return *can = one != other, cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
API cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    snprintf(id, (size_t)length, "0000:%02X:00.0", device + 1);
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    (void)device;
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
        case cudaDevAttrMaxBlockDimZ: *value = 64; break;
        case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
        case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = major >= 9 ? 232448 : 166912; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = major >= 9 ? 233472 : 167936; break;
        case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
        case cudaDevAttrWarpSize: case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
        case cudaDevAttrMultiProcessorCount: *value = 108; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
        case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
        case cudaDevAttrComputeCapabilityMajor: *value = major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = minor; break;
        case cudaDevAttrL2CacheSize: *value = 40 << 20; break;
        case cudaDevAttrUnifiedAddressing: case cudaDevAttrConcurrentKernels: case cudaDevAttrCooperativeLaunch:
        case cudaDevAttrCanMapHostMemory: case cudaDevAttrManagedMemory: *value = 1; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    if (device < 0 || device >= devices) return fail(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    strcpy(p->name, "Simulated CUDA device");
    p->uuid.bytes[0] = (char)(device + 1);
    p->pciBusID = device + 1;
    p->totalGlobalMem = memory;
    p->totalConstMem = 65536;
    p->memPitch = 2147483647;
    p->textureAlignment = 512;
    p->memoryBusWidth = 5120;
    p->asyncEngineCount = 3;
    p->major = major, p->minor = minor;
    struct { enum cudaDeviceAttr attribute; int *value; } fields[] = {
        {cudaDevAttrMaxThreadsPerBlock, &p->maxThreadsPerBlock},
        {cudaDevAttrMaxBlockDimX, &p->maxThreadsDim[0]}, {cudaDevAttrMaxBlockDimY, &p->maxThreadsDim[1]}, {cudaDevAttrMaxBlockDimZ, &p->maxThreadsDim[2]},
        {cudaDevAttrMaxGridDimX, &p->maxGridSize[0]}, {cudaDevAttrMaxGridDimY, &p->maxGridSize[1]}, {cudaDevAttrMaxGridDimZ, &p->maxGridSize[2]},
        {cudaDevAttrMaxRegistersPerBlock, &p->regsPerBlock}, {cudaDevAttrMaxRegistersPerMultiprocessor, &p->regsPerMultiprocessor},
        {cudaDevAttrWarpSize, &p->warpSize}, {cudaDevAttrMultiProcessorCount, &p->multiProcessorCount}, {cudaDevAttrL2CacheSize, &p->l2CacheSize},
        {cudaDevAttrMaxThreadsPerMultiProcessor, &p->maxThreadsPerMultiProcessor}, {cudaDevAttrMaxBlocksPerMultiprocessor, &p->maxBlocksPerMultiProcessor},
        {cudaDevAttrUnifiedAddressing, &p->unifiedAddressing}, {cudaDevAttrConcurrentKernels, &p->concurrentKernels},
        {cudaDevAttrCooperativeLaunch, &p->cooperativeLaunch}, {cudaDevAttrCanMapHostMemory, &p->canMapHostMemory}, {cudaDevAttrManagedMemory, &p->managedMemory},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) cudaDeviceGetAttribute(fields[i].value, fields[i].attribute, device);
    int value;
    cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlock, device), p->sharedMemPerBlock = (size_t)value;
    cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), p->sharedMemPerBlockOptin = (size_t)value;
    cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device), p->sharedMemPerMultiprocessor = (size_t)value;
    return cudaSuccess;
}

/* ---------------------------------------------------------------- memory */

enum { PINNED = -1, REGISTERED = -2 }; /* of the host, instead of a device's number */
typedef struct { char *start; size_t size; int device; } Block;
static Block *blocks;
static size_t block_count, block_room;

static void remember(void *start, size_t size, int device) { /* with the lock held */
    if (block_count == block_room) blocks = realloc(blocks, (block_room = 2 * block_room + 64) * sizeof *blocks);
    blocks[block_count++] = (Block){start, size, device};
}

static Block *find(const void *pointer) { /* with the lock held */
    for (size_t i = 0; i < block_count; i++)
        if ((char *)pointer >= blocks[i].start && (char *)pointer < blocks[i].start + blocks[i].size) return &blocks[i];
    return NULL;
}

/* Addresses at a multiple of the alignment, as the driver gives them. */
static void *map(size_t size, size_t alignment, int protection) {
    char *raw = mmap(NULL, size + alignment, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return NULL;
    char *start = (char *)(((uintptr_t)raw + alignment - 1) / alignment * alignment);
    if (start > raw) munmap(raw, (size_t)(start - raw));
    munmap(start + size, (size_t)(raw + alignment - start));
    return start;
}

static cudaError_t take(void **pointer, size_t size, int device) {
    size_t granule = device >= 0 ? PAGE : 4096, charged = (size + granule - 1) / granule * granule;
    *pointer = NULL;
    pthread_mutex_lock(&lock);
    if (device >= 0) make_context(device);
    if (device < 0 || used[device] + charged <= memory) *pointer = map(charged, granule, PROT_READ | PROT_WRITE);
    if (*pointer) {
        remember(*pointer, charged, device);
        if (device >= 0) used[device] += charged;
    }
    pthread_mutex_unlock(&lock);
    return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

static cudaError_t give_back(void *pointer) {
    if (!pointer) return cudaSuccess;
    pthread_mutex_lock(&lock);
    Block *block = find(pointer);
    int found = block && block->start == pointer;
    if (found) {
        if (block->device >= 0) used[block->device] -= block->size;
        if (block->device != REGISTERED) munmap(block->start, block->size);
        *block = blocks[--block_count];
    }
    pthread_mutex_unlock(&lock);
    return found ? cudaSuccess : fail(cudaErrorInvalidValue);
}

API cudaError_t cudaMalloc(void **pointer, size_t size) { return size ? take(pointer, size, current) : (*pointer = NULL, cudaSuccess); }
static void drain_all(void);
API cudaError_t cudaFree(void *pointer) { return drain_all(), give_back(pointer); }
API cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) { return (void)flags, take(pointer, size ? size : 1, PINNED); }
API cudaError_t cudaFreeHost(void *pointer) { return drain_all(), give_back(pointer); }
API cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    remember(pointer, size, REGISTERED);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void *pointer) { return drain_all(), give_back(pointer); }
API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    pthread_mutex_lock(&lock);
    make_context(current);
    *total = memory;
    *free_bytes = used[current] < memory ? memory - used[current] : 0;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *pointer) {
    memset(found, 0, sizeof *found);
    pthread_mutex_lock(&lock);
    Block *block = find(pointer);
    found->device = block && block->device >= 0 ? block->device : current;
    found->type = !block ? cudaMemoryTypeUnregistered : block->device >= 0 ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    if (block) found->devicePointer = (void *)pointer;
    if (block && block->device < 0) found->hostPointer = (void *)pointer;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

static cudaError_t copy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    if (inside && !may_read && kind == cudaMemcpyDeviceToHost) return simulated_refuse("an operator that reads what its kernels wrote");
    memmove(to, from, size);
    return cudaSuccess;
}
API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) { return copy(to, from, size, kind); }

/* Copies of side streams at an extreme of what is legal, so that a missing wait gives wrong bits every time.
 *
 *     late    when something waits for them: an event of theirs is waited for by a stream that computes, or by the host; their stream computes;
 *             memory goes back to the driver.
 *     early   when they are enqueued; and if their stream has not waited for all that others have computed until then, they might have come
 *             before that: what they write is junk.
 *
 * Streams that compute are never behind: an operator is done when it is called. */
typedef struct { void *to; const void *from; size_t size; int awaited; size_t until; } Queued; /* a copy; or a wait for another stream */
typedef struct { Queued *queue; size_t count, done, room, known; } Stream;
typedef struct { struct timespec time; int stream; size_t until, known; } Event;
#define MOST_STREAMS 4096
static Stream streams[MOST_STREAMS];
static size_t computed; /* operators, by now */
static pthread_mutex_t queues = PTHREAD_MUTEX_INITIALIZER;

static int number_of(cudaStream_t stream) {
    uintptr_t number = ((uintptr_t)stream - 0x1000) / 16;
    return (uintptr_t)stream < 0x1000 || number >= MOST_STREAMS ? 0 : (int)number;
}

static void drain(int number, size_t until) { /* with the lock held */
    Stream *stream = &streams[number];
    while (stream->done < until && stream->done < stream->count) {
        Queued *next = &stream->queue[stream->done++];
        if (next->size) memmove(next->to, next->from, next->size);
        else drain(next->awaited, next->until);
    }
    if (stream->done == stream->count) stream->done = stream->count = 0;
}

static void drain_all(void) {
    if (copies == NOW) return;
    pthread_mutex_lock(&queues);
    for (int number = 1; number < MOST_STREAMS; number++) drain(number, streams[number].count);
    pthread_mutex_unlock(&queues);
}

/* The stream is about to compute. */
API void simulated_computes(cudaStream_t stream) {
    if (copies == NOW) return;
    pthread_mutex_lock(&queues);
    int number = number_of(stream);
    drain(number, streams[number].count);
    streams[number].known = ++computed;
    pthread_mutex_unlock(&queues);
}
API int simulated_copies(void) { return copies != NOW; }

static void enqueue(int number, Queued entry) { /* with the lock held */
    Stream *stream = &streams[number];
    if (stream->count == stream->room) stream->queue = realloc(stream->queue, (stream->room = 2 * stream->room + 64) * sizeof entry);
    stream->queue[stream->count++] = entry;
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    int number = number_of(stream);
    int crosses = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToDevice;
    if (copies == NOW || !number || !crosses || !size) return copy(to, from, size, kind);
    pthread_mutex_lock(&queues);
    if (copies == LATE) enqueue(number, (Queued){to, from, size, 0, 0});
    else if (streams[number].known < computed) memset(to, 0xFF, size);
    else memmove(to, from, size);
    pthread_mutex_unlock(&queues);
    return cudaSuccess;
}
API cudaError_t cudaMemcpyPeerAsync(void *to, int target, const void *from, int source, size_t size, cudaStream_t stream) {
    return (void)target, (void)source, (void)stream, copy(to, from, size, cudaMemcpyDeviceToDevice);
}
API cudaError_t cudaMemcpy2DAsync(
    void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t stream
) {
    (void)stream;
    cudaError_t error = cudaSuccess;
    for (size_t row = 0; row < height && !error; row++) error = copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind);
    return error;
}
API cudaError_t cudaMemset(void *start, int value, size_t size) { return memset(start, value, size), cudaSuccess; }
API cudaError_t cudaMemsetAsync(void *start, int value, size_t size, cudaStream_t stream) { return (void)stream, cudaMemset(start, value, size); }

/* ---------------------------------------------------------------- streams and events */

static cudaError_t new_stream(cudaStream_t *stream) {
    static uintptr_t last = 0x1000;
    *stream = (cudaStream_t)__atomic_add_fetch(&last, 16, __ATOMIC_RELAXED);
    return cudaSuccess;
}
API cudaError_t cudaStreamCreate(cudaStream_t *stream) { return new_stream(stream); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return (void)flags, new_stream(stream); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { return (void)flags, (void)priority, new_stream(stream); }
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { return (void)stream, *priority = 0, cudaSuccess; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return (void)stream, *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
    const cudaGraphEdgeData **edges, size_t *count
) {
    (void)stream;
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (graph) *graph = NULL;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) {
    return (void)flags, call(stream, cudaSuccess, data), cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) { return (void)stream, call(data), cudaSuccess; }

/* An event is the time of the host's clock at which it was recorded, and how far its stream was. */
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    (void)flags;
    *event = calloc(1, sizeof(Event));
    return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    Event *made = (Event *)event;
    clock_gettime(CLOCK_MONOTONIC, &made->time);
    if (copies == NOW) return cudaSuccess;
    pthread_mutex_lock(&queues);
    made->stream = number_of(stream);
    made->until = streams[made->stream].count;
    made->known = streams[made->stream].known;
    pthread_mutex_unlock(&queues);
    return cudaSuccess;
}
static cudaError_t await_event(cudaEvent_t event) {
    Event *awaited = (Event *)event;
    if (copies == NOW) return cudaSuccess;
    pthread_mutex_lock(&queues);
    drain(awaited->stream, awaited->until);
    pthread_mutex_unlock(&queues);
    return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t event) { return await_event(event); }
API cudaError_t cudaEventSynchronize(cudaEvent_t event) { return await_event(event); }
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)flags;
    Event *awaited = (Event *)event;
    int number = number_of(stream);
    if (copies == NOW) return cudaSuccess;
    pthread_mutex_lock(&queues);
    if (streams[number].known < awaited->known) streams[number].known = awaited->known;
    if (copies == LATE && streams[awaited->stream].done < awaited->until) {
        if (number) enqueue(number, (Queued){NULL, NULL, 0, awaited->stream, awaited->until});
        else drain(awaited->stream, awaited->until);
    }
    pthread_mutex_unlock(&queues);
    return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (copies == NOW) return cudaSuccess;
    pthread_mutex_lock(&queues);
    drain(number_of(stream), streams[number_of(stream)].count);
    pthread_mutex_unlock(&queues);
    return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
API cudaError_t cudaDeviceSynchronize(void) { return drain_all(), cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return (void)flags, cudaEventRecord(event, stream); }
API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    struct timespec *from = &((Event *)start)->time, *to = &((Event *)end)->time;
    if (!from->tv_sec || !to->tv_sec) return fail(cudaErrorInvalidResourceHandle);
    *milliseconds = (float)(1e3 * (double)(to->tv_sec - from->tv_sec) + 1e-6 * (double)(to->tv_nsec - from->tv_nsec));
    return cudaSuccess;
}

/* ---------------------------------------------------------------- kernels: known by name, never run */

typedef struct { const void *host; const char *name; } Kernel;
static Kernel *kernels;
static size_t kernel_count, kernel_room;

API void **__cudaRegisterFatBinary(void *binary) { static void *some; return (void)binary, &some; }
API void __cudaRegisterFatBinaryEnd(void **binary) { (void)binary; }
API void __cudaUnregisterFatBinary(void **binary) { (void)binary; }
API char __cudaInitModule(void **binary) { return (void)binary, 1; }
API void __cudaRegisterFunction(
    void **binary, const char *host, char *device, const char *name, int limit, uint3 *t, uint3 *b, dim3 *block, dim3 *grid, int *warp
) {
    (void)binary, (void)device, (void)limit, (void)t, (void)b, (void)block, (void)grid, (void)warp;
    pthread_mutex_lock(&lock);
    if (kernel_count == kernel_room) kernels = realloc(kernels, (kernel_room = 2 * kernel_room + 4096) * sizeof *kernels);
    kernels[kernel_count++] = (Kernel){host, name};
    pthread_mutex_unlock(&lock);
}
API void __cudaRegisterVar(void **binary, char *host, char *address, const char *name, int ext, size_t size, int constant, int global) {
    (void)binary, (void)host, (void)address, (void)name, (void)ext, (void)size, (void)constant, (void)global;
}

static cudaError_t launched(const void *kernel, dim3 grid, dim3 block) {
    if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z || (size_t)block.x * block.y * block.z > 1024 || grid.y > 65535 || grid.z > 65535)
        return fail(cudaErrorInvalidConfiguration);
    if (inside) return cudaSuccess;
    for (size_t i = 0; i < kernel_count; i++)
        if (kernels[i].host == kernel) return simulated_refuse(kernels[i].name);
    return simulated_refuse("a kernel");
}

/* kernel<<<grid, block>>>(...) is compiled into a push, and a call of the host's function of that name, which pops and launches. */
static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *(void **)stream = pushed.stream;
    return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) { return *kernel = (cudaKernel_t)host, cudaSuccess; }
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return (void)arguments, (void)shared, (void)stream, launched(kernel, grid, block);
}
API cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return (void)arguments, (void)shared, (void)stream, launched(kernel, grid, block);
}
API cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return (void)arguments, (void)shared, (void)stream, launched(kernel, grid, block);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    return (void)arguments, launched(kernel, config->gridDim, config->blockDim);
}
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
    (void)kernel;
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 32;
    found->ptxVersion = found->binaryVersion = 10 * major + minor;
    found->maxDynamicSharedSizeBytes = 166912;
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *kernel, int block, size_t shared, unsigned flags) {
    (void)kernel, (void)flags;
    int by_threads = 2048 / (block > 0 ? block : 1), by_shared = shared ? (int)(167936 / shared) : 32;
    *count = by_threads < by_shared ? by_threads : by_shared;
    if (*count > 32) *count = 32;
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *kernel, int block, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, kernel, block, shared, 0);
}

/* ---------------------------------------------------------------- the driver, as far as torch asks for it */

API CUresult cuGetErrorString(CUresult error, const char **text) {
    return *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "not supported by the simulated device", CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }
API CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int *count) { return *count = devices, CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice *device, int number) { return *device = number, CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device), CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) { return *flags = 0, *active = has_context[device], CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext *found, CUdevice device) { return *found = (CUcontext)(uintptr_t)(device + 1), CUDA_SUCCESS; }
API CUresult cuCtxGetCurrent(CUcontext *found) { return *found = (CUcontext)(uintptr_t)(current + 1), CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext wanted) {
    if (wanted) current = (int)(uintptr_t)wanted - 1;
    return CUDA_SUCCESS;
}
API CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    return (void)pointer, *(uint64_t *)value = attribute == CU_POINTER_ATTRIBUTE_CONTEXT, CUDA_SUCCESS;
}
API CUresult cuMemsetD32Async(CUdeviceptr start, unsigned value, size_t count, CUstream stream) {
    (void)stream;
    for (size_t i = 0; i < count; i++) ((unsigned *)start)[i] = value;
    return CUDA_SUCCESS;
}

/* Expandable segments: addresses are reserved without memory, then memory is mapped page by page. */
typedef struct { size_t size; int device; } Physical;
API CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *kind, CUmemAllocationGranularity_flags flags) {
    return (void)kind, (void)flags, *size = PAGE, CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr *start, size_t size, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
    (void)alignment, (void)wanted, (void)flags;
    pthread_mutex_lock(&lock);
    *start = (CUdeviceptr)map(size, PAGE, PROT_NONE);
    if (*start) remember((void *)*start, size, current);
    pthread_mutex_unlock(&lock);
    return *start ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API CUresult cuMemAddressFree(CUdeviceptr start, size_t size) {
    pthread_mutex_lock(&lock);
    Block *block = find((void *)start);
    munmap((void *)start, size);
    if (block) *block = blocks[--block_count];
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle *made, size_t size, const CUmemAllocationProp *kind, unsigned long long flags) {
    (void)flags;
    int device = kind->location.id;
    pthread_mutex_lock(&lock);
    make_context(device);
    int fits = used[device] + size <= memory;
    if (fits) {
        Physical *physical = malloc(sizeof *physical);
        *physical = (Physical){size, device};
        used[device] += size;
        *made = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    }
    pthread_mutex_unlock(&lock);
    return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    Physical *physical = (Physical *)(uintptr_t)handle;
    pthread_mutex_lock(&lock);
    used[physical->device] -= physical->size;
    pthread_mutex_unlock(&lock);
    free(physical);
    return CUDA_SUCCESS;
}
static CUresult map_again(CUdeviceptr start, size_t size, int protection) {
    void *mapped = mmap((void *)start, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return mapped == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr start, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    return (void)offset, (void)handle, (void)flags, map_again(start, size, PROT_READ | PROT_WRITE);
}
API CUresult cuMemUnmap(CUdeviceptr start, size_t size) { return map_again(start, size, PROT_NONE); }
API CUresult cuMemSetAccess(CUdeviceptr start, size_t size, const CUmemAccessDesc *access, size_t count) {
    return (void)start, (void)size, (void)access, (void)count, CUDA_SUCCESS;
}

static CUresult not_supported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

API cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **found, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result
) {
    (void)version, (void)flags;
    *found = dlsym(RTLD_DEFAULT, name);
    if (!*found) *found = (void *)not_supported;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
