/* libcudart, the runtime API: settings, devices, handles, kernels, errors. Memory lies in cudart_memory.c, copies and
 * captured graphs in cudart_copies.c.
 *
 * Does: devices of a given number and size.
 * Does not: run a kernel (launches are counted); keep time (events are 0.01 ms apart); order anything between streams.
 */
#define _GNU_SOURCE
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread int current = 0;

static size_t number(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

size_t fakeCapacity(void) { /* read at each call: a test may take memory away while it runs */
    return number("FAKE_CUDA_MEMORY", (size_t)8 << 30);
}

int fakeDevices(void) {
    static int count = -1;
    if (count < 0) count = (int)number("FAKE_CUDA_DEVICES", 1);
    return count > FAKE_DEVICES ? FAKE_DEVICES : count;
}

int fakeTraced(void) {
    static int on = -1;
    if (on < 0) on = getenv("FAKE_CUDA_TRACE") != NULL;
    return on;
}

/* Devices. */

int cudaGetDeviceCount(int *count) {
    *count = fakeDevices();
    return *count ? SUCCESS : fakeFailed(NO_DEVICE);
}

int cudaGetDevice(int *device) {
    *device = current;
    return SUCCESS;
}

int cudaSetDevice(int device) {
    if (device < 0 || device >= fakeDevices()) return fakeFailed(fakeDevices() ? INVALID_DEVICE : NO_DEVICE);
    current = device;
    return SUCCESS;
}

int cudaDriverGetVersion(int *version) {
    *version = 1000 * FAKE_MAJOR;
    return SUCCESS;
}

int cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

/* Offsets of the members onnxruntime reads. CUDA 13 dropped a few members in between. */
int cudaGetDeviceProperties(char *properties, int device) {
    if (device < 0 || device >= fakeDevices()) return fakeFailed(INVALID_DEVICE);
    const int thirteen = FAKE_MAJOR >= 13;
    const int block[6] = {1024, 1024, 64, 2147483647, 65535, 65535}; /* most threads and blocks a dimension */
    memset(properties, 0, thirteen ? 840 : 1032);
    strcpy(properties, FAKE_NAME);
    *(size_t *)(properties + 288) = fakeCapacity();
    *(size_t *)(properties + 296) = 49152;           /* shared memory of a block */
    *(int *)(properties + 304) = 65536;              /* registers of a block */
    *(int *)(properties + 308) = 32;                 /* threads of a warp */
    *(size_t *)(properties + 312) = (size_t)1 << 30; /* pitch */
    *(int *)(properties + 320) = 1024;               /* threads of a block */
    memcpy(properties + 324, block, sizeof block);
    *(size_t *)(properties + 352) = 65536; /* constant memory */
    *(int *)(properties + 360) = FAKE_SM;
    *(int *)(properties + 364) = 0;
    *(size_t *)(properties + 368) = 512; /* texture alignment */
    *(size_t *)(properties + 376) = 32;
    *(int *)(properties + (thirteen ? 384 : 388)) = FAKE_CORES;
    *(int *)(properties + (thirteen ? 604 : 624)) = 2048; /* threads of a multiprocessor */
    return SUCCESS;
}

int cudaGetDeviceProperties_v2(char *properties, int device) { return cudaGetDeviceProperties(properties, device); }

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    if (device < 0 || device >= fakeDevices()) return fakeFailed(INVALID_DEVICE);
    switch (attribute) {
        case 1: *value = 1024; break;        /* threads of a block */
        case 8: *value = 49152; break;       /* shared memory of a block */
        case 10: *value = 32; break;         /* threads of a warp */
        case 16: *value = FAKE_CORES; break; /* multiprocessors */
        case 39: *value = 2048; break;       /* threads of a multiprocessor */
        case 75: *value = FAKE_SM; break;
        case 76: *value = 0; break;
        case 81: *value = 233472; break; /* shared memory of a multiprocessor */
        case 97: *value = 232448; break; /* shared memory of a block that asks for more */
        default: *value = 1;
    }
    return SUCCESS;
}

/* Streams, events, libraries: handles of nothing. All work is done when a call returns. */

static int make_handle(void **handle) {
    *handle = calloc(1, 4096); /* roomier than whatever a caller reads through it */
    return *handle ? SUCCESS : fakeFailed(OUT_OF_MEMORY);
}

static int drop_handle(void *handle) {
    free(handle);
    return SUCCESS;
}

int cudaStreamCreate(void **stream) { return make_handle(stream); }
int cudaStreamDestroy(void *stream) { return drop_handle(stream); }
int cudaEventCreate(void **event) { return make_handle(event); }
int cudaEventDestroy(void *event) { return drop_handle(event); }
int cudaLibraryLoadData(void **library) { return make_handle(library); }
int cudaLibraryGetKernel(void **kernel) { return make_handle(kernel); }
int __cudaGetKernel(void **kernel) { return make_handle(kernel); }

int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    (void)flags;
    return make_handle(stream);
}

int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    (void)priority;
    return cudaStreamCreateWithFlags(stream, flags);
}

int cudaEventCreateWithFlags(void **event, unsigned flags) {
    (void)flags;
    return make_handle(event);
}

int cudaMemPoolCreate(void **pool, const void *properties) {
    (void)properties;
    return make_handle(pool);
}

int cudaEventElapsedTime(float *milliseconds, void *start, void *stop) {
    (void)start;
    (void)stop;
    *milliseconds = 0.01f;
    return SUCCESS;
}

int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    (void)stream;
    function(data);
    return SUCCESS;
}

/* Kernels: registered, asked about, launched, never run. */

static long launches = 0;

long fakeLaunches(void) { return launches; }

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[4];
    (void)binary;
    return handle;
}

unsigned __cudaPushCallConfiguration(void) { return 0; }

int __cudaPopCallConfiguration(unsigned *grid, unsigned *block, size_t *shared, void **stream) {
    for (int i = 0; i < 3; i++) grid[i] = block[i] = 1;
    *shared = 0;
    *stream = NULL;
    return SUCCESS;
}

int cudaLaunchKernel(const void *kernel, ...) {
    (void)kernel;
    __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED);
    return SUCCESS;
}

int cudaLaunchKernelExC(const void *configuration, const void *kernel, void **arguments) {
    (void)configuration;
    (void)arguments;
    return cudaLaunchKernel(kernel);
}

int cudaFuncGetAttributes(char *attributes, const void *kernel) {
    (void)kernel;
    memset(attributes, 0, 128);
    *(int *)(attributes + 24) = 1024; /* threads of a block */
    *(int *)(attributes + 28) = 32;   /* registers */
    *(int *)(attributes + 32) = *(int *)(attributes + 36) = 10 * FAKE_SM; /* PTX and binary version */
    return SUCCESS;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks_each, const void *kernel, int threads,
                                                           size_t shared, unsigned flags) {
    (void)kernel;
    (void)threads;
    (void)shared;
    (void)flags;
    *blocks_each = 2;
    return SUCCESS;
}

static int nothing(void) { return SUCCESS; }

int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                     int *status) {
    (void)symbol;
    (void)version;
    (void)flags;
    *function = (void *)nothing;
    if (status) *status = 0;
    return SUCCESS;
}

int cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *status) {
    return cudaGetDriverEntryPointByVersion(symbol, function, 0, flags, status);
}

/* Errors. */

static __thread int last_error = SUCCESS;

int fakeFailed(int error) {
    last_error = error;
    return error;
}

int cudaGetLastError(void) {
    int error = last_error;
    last_error = SUCCESS;
    return error;
}

int cudaPeekAtLastError(void) { return last_error; }

static const struct {
    int error;
    const char *name, *text;
} errors[] = {
    {SUCCESS, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {NO_DEVICE, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error in capture"},
};

const char *cudaGetErrorString(int error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error) return errors[i].text;
    return "an error of the stand-in's";
}

const char *cudaGetErrorName(int error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error) return errors[i].name;
    return "cudaErrorUnknown";
}
