/* A libcuda.so.1 that answers questions about the emulated device, from the same environment. */
#include <stdlib.h>
#include <string.h>

static const char *text(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}

int cuInit(unsigned flags) { (void)flags; return atoi(text("EMULATED_CUINIT", "0")); }

int cuDriverGetVersion(int *version) { *version = atoi(text("EMULATED_DRIVER", "12060")); return 0; }

int cuDeviceGetCount(int *count) { *count = atoi(text("EMULATED_DEVICES", "1")); return 0; }

int cuDeviceGet(int *device, int ordinal) {
    int count;
    cuDeviceGetCount(&count);
    *device = ordinal;
    return ordinal >= 0 && ordinal < count ? 0 : 101;
}

int cuDeviceGetName(char *name, int length, int device) {
    (void)device;
    strncpy(name, text("EMULATED_GPU", "Orin (nvgpu)"), (size_t)length - 1);
    name[length - 1] = 0;
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    const char *sm = text("EMULATED_SM", "8.7");
    const char *dot = strchr(sm, '.');
    int integrated = atoi(text("EMULATED_INTEGRATED", "1"));
    (void)device;
    switch (attribute) {
    case 18: *value = integrated; return 0;
    case 75: *value = atoi(sm); return 0;
    case 76: *value = dot ? atoi(dot + 1) : 0; return 0;
    case 89: *value = atoi(text("EMULATED_CONCURRENT_MANAGED", integrated ? "0" : "1")); return 0;
    default: *value = 0; return 0;
    }
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    (void)device;
    *bytes = (size_t)strtoull(text("EMULATED_MEMORY", "8589934592"), NULL, 10);
    return 0;
}

int cuGetErrorString(int error, const char **words) {
    switch (error) {
    case 0: *words = "no error"; return 0;
    case 2: *words = "out of memory"; return 0;
    case 3: *words = "initialization error"; return 0;
    case 35: *words = "CUDA driver version is insufficient for CUDA runtime version"; return 0;
    case 100: *words = "no CUDA-capable device is detected"; return 0;
    case 101: *words = "invalid device ordinal"; return 0;
    case 802: *words = "system not yet initialized"; return 0;
    case 803: *words = "system has unsupported display driver / cuda driver combination"; return 0;
    case 999: *words = "unknown error"; return 0;
    default: *words = NULL; return 1;
    }
}

int cuGetErrorName(int error, const char **name) {
    *name = error == 0 ? "CUDA_SUCCESS" : error == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_UNKNOWN";
    return 0;
}
