// What bridge.stream.driver calls of CUDA and of HIP, on a CPU: it writes down what it is asked, and runs two kernels.
// fill_N: byte 7 into the first grid.x bytes of its last argument. copy_N: as many bytes of the first into the last.
// The number at the end of their names is how many arguments they take; of other kernels fake_arity says it, or none
// are written down.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char text[1 << 20];
static struct { char name[128]; int arity; } kernels[1024];
static int count, next_status;
static struct { char name[128]; int arity; } known[1024];
static int known_count;

#define NOTE(...) snprintf(text + strlen(text), sizeof text - strlen(text), __VA_ARGS__)

const char *fake_log(void) { return text; }
void fake_reset(void) { text[0] = 0; next_status = 0; }
void fake_fail(int status) { next_status = status; }
void fake_arity(const char *name, int arity) {
  strcpy(known[known_count].name, name);
  known[known_count++].arity = arity;
}

static int load(void **module, const char *code) {
  if (memcmp(code, "\x7f" "ELF", 4)) return 200;
  *module = (void *)0x1000;
  NOTE("load\n");
  return 0;
}

static int find(void **function, void *module, const char *name) {
  if (module != (void *)0x1000 || !strncmp(name, "missing", 7)) return 500;
  const char *digits = name + strlen(name);
  while (digits > name && digits[-1] >= '0' && digits[-1] <= '9') digits--;
  int ours = !strncmp(name, "fill_", 5) || !strncmp(name, "copy_", 5);
  int arity = ours ? atoi(digits) : 0;
  for (int i = 0; i < known_count; i++)
    if (!strcmp(known[i].name, name)) arity = known[i].arity;
  strcpy(kernels[count].name, name);
  kernels[count].arity = arity;
  *function = (void *)(uintptr_t)(0x2000 + count++);
  return 0;
}

static int launch(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned tx, unsigned ty, unsigned tz,
                  unsigned shared, void *stream, void **arguments, void **extra) {
  if (next_status) { int status = next_status; next_status = 0; return status; }
  int i = (int)((uintptr_t)function - 0x2000);
  if (i < 0 || i >= count || extra) return 400;
  NOTE("%s %u %u %u %u %u %u %u %lu", kernels[i].name, gx, gy, gz, tx, ty, tz, shared, (unsigned long)(uintptr_t)stream);
  int n = kernels[i].arity;
  for (int j = 0; j < n; j++) NOTE(" %lu", (unsigned long)*(uint64_t *)arguments[j]);
  NOTE("\n");
  char *last = n ? *(char **)arguments[n - 1] : 0;
  if (!strncmp(kernels[i].name, "fill", 4)) memset(last, 7, gx);
  if (!strncmp(kernels[i].name, "copy", 4)) memcpy(last, *(char **)arguments[0], gx);
  return 0;
}

int cuModuleLoadData(void **module, const void *code) { return load(module, code); }
int cuModuleGetFunction(void **function, void *module, const char *name) { return find(function, module, name); }
int cuFuncSetAttribute(void *function, int attribute, int value) {
  NOTE("attribute %d %d\n", attribute, value);
  return value > 232448;
}
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned tx, unsigned ty, unsigned tz, unsigned shared,
                   void *stream, void **arguments, void **extra) {
  return launch(f, gx, gy, gz, tx, ty, tz, shared, stream, arguments, extra);
}
int cuGetErrorString(int status, const char **out) {
  *out = status == 200 ? "device kernel image is invalid" : "named symbol not found";
  return 0;
}

int hipModuleLoadData(void **module, const void *code) { return load(module, code); }
int hipModuleGetFunction(void **function, void *module, const char *name) { return find(function, module, name); }
int hipModuleLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned tx, unsigned ty, unsigned tz,
                          unsigned shared, void *stream, void **arguments, void **extra) {
  return launch(f, gx, gy, gz, tx, ty, tz, shared, stream, arguments, extra);
}
const char *hipGetErrorString(int status) { return status == 200 ? "hipErrorInvalidImage" : "hipErrorNotFound"; }
