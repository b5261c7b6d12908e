/* libcuda: the part of the driver API that programs call themselves, on top of the runtime's stand-in.
 *
 * Does: devices, primary contexts (a context is a device), memory, copies, fills, streams, events, entry points by name.
 * Does not: modules, kernels, virtual memory management: their entry points aren't found.
 */
#define _GNU_SOURCE
#include "fake.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID_CONTEXT = 201, NOT_FOUND = 500 };

static void *context_of(int device) { return (void *)(intptr_t)(device + 1); }
static int device_of(const void *context) { return (int)(intptr_t)context - 1; }

int cuInit(unsigned flags) {
    int count;
    (void)flags;
    return cudaGetDeviceCount(&count);
}

int cuDriverGetVersion(int *version) {
    const char *text = getenv("FAKE_CUDA_DRIVER");
    *version = text ? atoi(text) : 1000 * FAKE_MAJOR;
    return SUCCESS;
}

/* Devices and contexts. */

int cuDeviceGetCount(int *count) {
    *count = fakeDevices();
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < fakeDevices() ? SUCCESS : INVALID_DEVICE;
}

int cuDeviceGetName(char *name, int size, int device) {
    if (device < 0 || device >= fakeDevices()) return INVALID_DEVICE;
    snprintf(name, (size_t)size, "%s", FAKE_NAME);
    return SUCCESS;
}

int cuDeviceGetUuid_v2(char *uuid, int device) {
    memset(uuid, 0, 16);
    uuid[15] = (char)device;
    return device < fakeDevices() ? SUCCESS : INVALID_DEVICE;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, attribute, device);
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    size_t used;
    return fakeMemory(device, &used, bytes);
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = context_of(device);
    return device >= 0 && device < fakeDevices() ? SUCCESS : INVALID_DEVICE;
}

int cuDevicePrimaryCtxRelease_v2(int device) { return device < fakeDevices() ? SUCCESS : INVALID_DEVICE; }

int cuCtxSetCurrent(void *context) { return context ? cudaSetDevice(device_of(context)) : SUCCESS; }

int cuCtxGetCurrent(void **context) {
    int device;
    cudaGetDevice(&device);
    *context = context_of(device);
    return SUCCESS;
}

int cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); } /* no stack: the last one set counts */
int cuCtxPopCurrent_v2(void **context) { return cuCtxGetCurrent(context); }

int cuCtxGetDevice(int *device) { return cudaGetDevice(device); }
int cuCtxSynchronize(void) { return cudaDeviceSynchronize(); }

/* Memory. */

int cudaGetLastError(void);

int cuMemAlloc_v2(void **pointer, size_t size) {
    int error = size ? cudaMalloc(pointer, size) : INVALID_VALUE;
    cudaGetLastError(); /* what the driver refuses is no error of the runtime's */
    return error;
}
int cuMemFree_v2(void *pointer) { return cudaFree(pointer); }
int cuMemAllocHost_v2(void **pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }
int cuMemHostAlloc(void **pointer, size_t size, unsigned flags) { return cudaHostAlloc(pointer, size, flags); }
int cuMemFreeHost(void *pointer) { return cudaFreeHost(pointer); }
int cuMemGetInfo_v2(size_t *available, size_t *total) { return cudaMemGetInfo(available, total); }

int cuMemcpyHtoD_v2(void *to, const void *from, size_t size) { return cudaMemcpy(to, from, size, HOST_TO_DEVICE); }
int cuMemcpyDtoH_v2(void *to, const void *from, size_t size) { return cudaMemcpy(to, from, size, DEVICE_TO_HOST); }
int cuMemcpyDtoD_v2(void *to, const void *from, size_t size) { return cudaMemcpy(to, from, size, DEVICE_TO_DEVICE); }
int cuMemcpy(void *to, const void *from, size_t size) { return cudaMemcpy(to, from, size, EITHER_WAY); }

int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t size, void *stream) {
    return cudaMemcpyAsync(to, from, size, HOST_TO_DEVICE, stream);
}

int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t size, void *stream) {
    return cudaMemcpyAsync(to, from, size, DEVICE_TO_HOST, stream);
}

int cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t size, void *stream) {
    return cudaMemcpyAsync(to, from, size, DEVICE_TO_DEVICE, stream);
}

int cuMemcpyAsync(void *to, const void *from, size_t size, void *stream) {
    return cudaMemcpyAsync(to, from, size, EITHER_WAY, stream);
}

int cuMemsetD8_v2(void *to, unsigned char value, size_t size) { return cudaMemset(to, value, size); }

int cuMemsetD8Async(void *to, unsigned char value, size_t size, void *stream) {
    return cudaMemsetAsync(to, value, size, stream);
}

/* Of the attributes: 2, the memory's type (1 host, 2 device), and 9, the device's ordinal. */
int cuPointerGetAttribute(void *data, int attribute, const void *pointer) {
    int device = fakeDeviceOf(pointer);
    if (device < 0 || (attribute != 2 && attribute != 9)) return INVALID_VALUE;
    *(int *)data = attribute == 2 ? 2 : device;
    return SUCCESS;
}

/* Streams and events. */

/* 1: it waits for no other stream, nor they for it. */
int cuStreamCreate(void **stream, unsigned flags) {
    int error = cudaStreamCreate(stream);
    return error || flags != 1 ? error : fakeMakeLate(*stream);
}

int cuStreamDestroy_v2(void *stream) {
    fakeEndLate(stream);
    return cudaStreamDestroy(stream);
}

int cuStreamSynchronize(void *stream) { return cudaStreamSynchronize(stream); }

int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)stream;
    (void)event;
    (void)flags;
    return SUCCESS;
}

int cuEventCreate(void **event, unsigned flags) {
    (void)flags;
    return cudaEventCreate(event);
}

int cuEventDestroy_v2(void *event) { return cudaEventDestroy(event); }

int cuEventRecord(void *event, void *stream) {
    (void)event;
    (void)stream;
    return SUCCESS;
}

int cuEventSynchronize(void *event) {
    (void)event;
    return SUCCESS;
}

int cuEventElapsedTime(float *milliseconds, void *start, void *stop) {
    return cudaEventElapsedTime(milliseconds, start, stop);
}

/* Errors, and entry points by name. */

int cuGetErrorString(int error, const char **text) {
    *text = cudaGetErrorString(error);
    return SUCCESS;
}

int cuGetErrorName(int error, const char **name) {
    *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : cudaGetErrorName(error);
    return SUCCESS;
}

int cuTensorMapEncodeTiled(void) { return SUCCESS; } /* onnxruntime links to it */

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    static const char *const suffixes[] = {"_v2", ""};
    char name[256];
    void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    (void)version;
    (void)flags;
    *function = NULL;
    for (int i = 0; self && i < 2 && !*function; i++) {
        snprintf(name, sizeof name, "%s%s", symbol, suffixes[i]);
        *function = dlsym(self, name);
    }
    if (self) dlclose(self);
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}

int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
