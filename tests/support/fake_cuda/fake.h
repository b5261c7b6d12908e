/* What the stand-in's libraries share. Declarations are our own: names, argument order and numbers are CUDA's ABI.
 *
 * Set by environment variables, read once:
 *   FAKE_CUDA_DEVICES    devices there are (default 1, at most 16; 0 is a machine without)
 *   FAKE_CUDA_MEMORY     bytes each of them has (default 8 GiB)
 *   FAKE_CUDA_DRIVER     the newest CUDA that the driver serves (default that of the caller, as 13000)
 *   FAKE_CUDNN_WORKSPACE bytes of scratch that cuDNN's plans ask for (default 1 MiB)
 *   FAKE_CUDA_TRACE      if set, allocations, copies, captures and graph launches are printed to stderr
 */
#ifndef MEMONGER_FAKE_CUDA_H
#define MEMONGER_FAKE_CUDA_H

#include <stddef.h>
#include <stdint.h>

#define FAKE_DEVICES 16
#define FAKE_NAME "Fake CUDA device"
#define FAKE_SM 9     /* compute capability 9.0, 132 multiprocessors: as an H100 or H200 */
#define FAKE_CORES 132
#ifndef FAKE_MAJOR
#define FAKE_MAJOR 13 /* the CUDA release whose ABI the caller was built for */
#endif

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101 };
enum { CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901 };
enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, EITHER_WAY }; /* kinds of copies */

/* libcudart's own: the other libraries are built on it. */
size_t fakeCapacity(void);                               /* bytes of each device */
int fakeDevices(void);                                   /* how many there are */
int fakeDeviceOf(const void *address);                   /* the device it lies on, -1: the host */
int fakeMemory(int device, size_t *used, size_t *total); /* 0, or INVALID_DEVICE */
long fakeLaunches(void);                                 /* kernels launched by this process */
int fakeFailed(int error);                               /* the error, which is also kept as the thread's last */
int fakeForbidden(const char *call);                     /* a capture is going on, and the call spoilt it */
int fakeMakeLate(void *stream);                          /* copies on it are made when somebody waits for it */
void fakeEndLate(void *stream);                          /* before it is given back */
int fakeTraced(void);
#define TRACE(...)                                                                                                     \
    do {                                                                                                               \
        if (fakeTraced()) fprintf(stderr, __VA_ARGS__);                                                                \
    } while (0)

int cudaGetDeviceCount(int *count);
int cudaGetDevice(int *device);
int cudaSetDevice(int device);
int cudaDeviceGetAttribute(int *value, int attribute, int device);
int cudaMalloc(void **pointer, size_t size);
int cudaFree(void *pointer);
int cudaHostAlloc(void **pointer, size_t size, unsigned flags);
int cudaFreeHost(void *pointer);
int cudaMemGetInfo(size_t *available, size_t *total);
int cudaMemcpy(void *to, const void *from, size_t size, int kind);
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream);
int cudaMemset(void *to, int value, size_t size);
int cudaMemsetAsync(void *to, int value, size_t size, void *stream);
int cudaStreamCreate(void **stream);
int cudaStreamDestroy(void *stream);
int cudaStreamSynchronize(void *stream);
int cudaDeviceSynchronize(void);
int cudaEventCreate(void **event);
int cudaEventDestroy(void *event);
int cudaEventElapsedTime(float *milliseconds, void *start, void *stop);
const char *cudaGetErrorString(int error);
const char *cudaGetErrorName(int error);

#endif
