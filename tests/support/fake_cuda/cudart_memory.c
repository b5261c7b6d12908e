/* libcudart's memory: allocations that are counted by device, and told apart from the host's by their address.
 *
 * Does: cudaMalloc and its like, which never touch a page and fail where the device is full.
 * Does not: pools (their allocations are ordinary ones), managed memory, memory shared with other processes.
 */
#define _GNU_SOURCE
#include "fake.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Allocations: sorted by address, which no two share. */

typedef struct {
    char *start;
    size_t size; /* as asked for; at least one byte is mapped */
    int device;
} Block;

static Block *blocks = NULL;
static size_t block_count = 0, block_room = 0;
static size_t used[FAKE_DEVICES];

static size_t mapped(size_t size) { return size ? size : 1; }

/* The first block that starts behind an address. */
static size_t above(const char *address) {
    size_t low = 0, high = block_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].start <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* The device an address lies on, -1 for the host. */
int fakeDeviceOf(const void *address) {
    pthread_mutex_lock(&lock);
    size_t next = above(address);
    int device = -1;
    if (next && (const char *)address < blocks[next - 1].start + mapped(blocks[next - 1].size))
        device = blocks[next - 1].device;
    pthread_mutex_unlock(&lock);
    return device;
}

static int insert(Block block) {
    if (block_count == block_room) {
        size_t room = block_room ? 2 * block_room : 1024;
        Block *larger = realloc(blocks, room * sizeof(Block));
        if (!larger) return 0;
        blocks = larger;
        block_room = room;
    }
    size_t at = above(block.start);
    memmove(blocks + at + 1, blocks + at, (block_count - at) * sizeof(Block));
    blocks[at] = block;
    block_count++;
    return 1;
}

int fakeMemory(int device, size_t *used_bytes, size_t *total) {
    if (device < 0 || device >= fakeDevices()) return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    *used_bytes = used[device];
    *total = fakeCapacity();
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

static int device_in_use(void) {
    int device;
    cudaGetDevice(&device);
    return device < fakeDevices() ? device : -1;
}

int cudaMalloc(void **pointer, size_t size) {
    *pointer = NULL;
    if (fakeForbidden("cudaMalloc")) return fakeFailed(CAPTURE_UNSUPPORTED);
    int current = device_in_use();
    if (current < 0) return fakeFailed(NO_DEVICE);
    pthread_mutex_lock(&lock);
    int fits = size <= fakeCapacity() - used[current];
    void *start = fits ? mmap(NULL, mapped(size), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                       : MAP_FAILED;
    int made = start != MAP_FAILED && insert((Block){start, size, current});
    if (made) used[current] += size;
    pthread_mutex_unlock(&lock);
    TRACE("cudaMalloc %zu on %d%s\n", size, current, made ? "" : ": full");
    if (!made) return fakeFailed(OUT_OF_MEMORY);
    *pointer = start;
    return SUCCESS;
}

int cudaFree(void *pointer) {
    if (!pointer) return SUCCESS;
    if (fakeForbidden("cudaFree")) return fakeFailed(CAPTURE_UNSUPPORTED);
    pthread_mutex_lock(&lock);
    size_t next = above(pointer);
    int known = next && blocks[next - 1].start == pointer;
    if (known) {
        Block block = blocks[next - 1];
        memmove(blocks + next - 1, blocks + next, (block_count - next) * sizeof(Block));
        block_count--;
        used[block.device] -= block.size;
        munmap(block.start, mapped(block.size));
        TRACE("cudaFree %zu on %d\n", block.size, block.device);
    }
    pthread_mutex_unlock(&lock);
    return known ? SUCCESS : fakeFailed(INVALID_VALUE);
}

int cudaMallocAsync(void **pointer, size_t size, void *stream) {
    (void)stream;
    return cudaMalloc(pointer, size);
}

int cudaMallocFromPoolAsync(void **pointer, size_t size, void *pool, void *stream) {
    (void)pool;
    return cudaMallocAsync(pointer, size, stream);
}

int cudaFreeAsync(void *pointer, void *stream) {
    (void)stream;
    return cudaFree(pointer);
}

/* Pinned memory is plain host memory. */
int cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    (void)flags;
    *pointer = malloc(mapped(size));
    return *pointer ? SUCCESS : fakeFailed(OUT_OF_MEMORY);
}

int cudaMallocHost(void **pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }

int cudaFreeHost(void *pointer) {
    free(pointer);
    return SUCCESS;
}

int cudaMemGetInfo(size_t *available, size_t *total) {
    size_t taken;
    if (fakeMemory(device_in_use(), &taken, total)) return fakeFailed(NO_DEVICE);
    *available = *total - taken;
    return SUCCESS;
}

int cudaMemPoolGetAttribute(void *pool, int attribute, uint64_t *value) {
    (void)pool;
    (void)attribute;
    *value = 0;
    return SUCCESS;
}

int cudaPointerGetAttributes(char *attributes, const void *pointer) {
    int device = fakeDeviceOf(pointer);
    memset(attributes, 0, 24);
    *(int *)attributes = device < 0 ? 0 : 2; /* 0: unregistered, 2: device */
    *(int *)(attributes + 4) = device;
    *(const void **)(attributes + (device < 0 ? 16 : 8)) = pointer;
    return SUCCESS;
}

