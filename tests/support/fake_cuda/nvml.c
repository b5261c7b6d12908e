/* libnvidia-ml: devices and their memory, as a monitor sees them.
 *
 * Does: used, free and total bytes of each device, and the bytes of processes on it.
 * Does not: see other processes. What is used is what the calling process allocated: a monitor in a process of its own
 * finds every device empty.
 */
#include "fake.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { NVML_INVALID_ARGUMENT = 2, NVML_NOT_FOUND = 6, NVML_INSUFFICIENT_SIZE = 7 };

typedef struct {
    unsigned long long total, available, used;
} Memory;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, available, used;
} VersionedMemory;

typedef struct {
    unsigned process;
    unsigned long long used;
    unsigned instance, compute_instance;
} Process;

/* A handle is the device's number plus one: never NULL. */
static int device_of(const void *handle) { return (int)(intptr_t)handle - 1; }

int nvmlInit_v2(void) { return SUCCESS; }

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)fakeDevices();
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = (void *)(intptr_t)(index + 1);
    return (int)index < fakeDevices() ? SUCCESS : NVML_INVALID_ARGUMENT;
}

int nvmlDeviceGetIndex(const void *handle, unsigned *index) {
    *index = (unsigned)device_of(handle);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(const void *handle, Memory *memory) {
    size_t used, total;
    if (fakeMemory(device_of(handle), &used, &total)) return NVML_INVALID_ARGUMENT;
    *memory = (Memory){total, total - used, used};
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(const void *handle, VersionedMemory *memory) {
    Memory found;
    int error = nvmlDeviceGetMemoryInfo(handle, &found);
    if (!error) *memory = (VersionedMemory){memory->version, found.total, 0, found.available, found.used};
    return error;
}

int nvmlDeviceGetComputeRunningProcesses_v3(const void *handle, unsigned *count, Process *processes) {
    Memory found;
    int error = nvmlDeviceGetMemoryInfo(handle, &found);
    if (error) return error;
    unsigned room = *count;
    *count = found.used ? 1 : 0;
    if (room < *count) return NVML_INSUFFICIENT_SIZE;
    if (*count) processes[0] = (Process){(unsigned)getpid(), found.used, ~0u, ~0u};
    return SUCCESS;
}

int nvmlDeviceGetName(const void *handle, char *name, unsigned size) {
    (void)handle;
    snprintf(name, size, "%s", FAKE_NAME);
    return SUCCESS;
}

int nvmlDeviceGetUUID(const void *handle, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-00000000-0000-0000-0000-%012d", device_of(handle));
    return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    snprintf(version, size, "fake");
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 1000 * FAKE_MAJOR;
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

const char *nvmlErrorString(int error) {
    switch (error) {
        case SUCCESS: return "Success";
        case NVML_INVALID_ARGUMENT: return "Invalid Argument";
        case NVML_NOT_FOUND: return "Not Found";
        case NVML_INSUFFICIENT_SIZE: return "Insufficient Size";
        default: return "an error of the stand-in's";
    }
}
