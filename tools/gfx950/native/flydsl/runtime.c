// The runtime calls that FlyDSL's compiled launchers make, without a driver: a launch is handed to a callback.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*launch_callback)(const void* blob, uint64_t size, const char* kernel, const int64_t* dimensions, int32_t dynamic_lds,
                                void** parameters, uint64_t count);
static launch_callback callback;
void gfx950_set_launch_callback(launch_callback f) { callback = f; }

struct module {
    const void* blob;
    uint64_t size;
};
struct function {
    struct module* module;
    char name[];
};

void* mgpuModuleLoad(void* data, size_t size) {
    struct module* m = malloc(sizeof *m);
    m->blob = data;
    m->size = size;
    return m;
}
void mgpuModuleUnload(void* m) { free(m); }
void* mgpuModuleGetFunction(void* m, const char* name) {
    struct function* f = malloc(sizeof *f + strlen(name) + 1);
    f->module = m;
    strcpy(f->name, name);
    return f;
}
void mgpuLaunchKernel(void* function, intptr_t gx, intptr_t gy, intptr_t gz, intptr_t bx, intptr_t by, intptr_t bz, int32_t dynamic_lds,
                      void* stream, void** parameters, void** extra, size_t count) {
    (void)stream;
    (void)extra;
    struct function* f = function;
    int64_t dimensions[6] = {gx, gy, gz, bx, by, bz};
    if (callback) callback(f->module->blob, f->module->size, f->name, dimensions, dynamic_lds, parameters, count);
    else fprintf(stderr, "no emulator is active: the launch of %s is dropped\n", f->name);
}
void* mgpuStreamCreate(void) { return 0; }
void mgpuStreamDestroy(void* s) { (void)s; }
void mgpuStreamSynchronize(void* s) { (void)s; }
