/* Plays graphics cards from a text file, as libnvidia-ml.so.1 would show them.

   The file that SCRIPTED_NVML names is read anew at each call. A line is a card, a figure and its value: "0 power 300000".
   A value "!15" makes the call return that error. A figure without a line is not supported; a card with the line "0 lost 1"
   has fallen off the bus. "* cards 2" is their number, "* init hang" a driver that never answers. A call that newer drivers
   have, nvmlDeviceGetCurrentClocksEventReasons, is missing on purpose: only its older name is there. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, LOST = 15, SLICES = 4 };
typedef int *Device; /* points to its number: of a card, or 100 + SLICES * card + slice */
static int numbers[200];

static int look_up(const char *card, const char *figure, char *value) {
    char line[256], who[16], what[32];
    FILE *script = fopen(getenv("SCRIPTED_NVML"), "r");
    int found = 0;
    while (!found && script && fgets(line, sizeof line, script))
        found = sscanf(line, "%15s %31s %127[^\n]", who, what, value) == 3 && !strcmp(who, card) && !strcmp(what, figure);
    if (script) fclose(script);
    return found;
}

static int text(Device device, const char *figure, char *value) {
    char card[16];
    sprintf(card, "%d", *device);
    if (look_up(card, "lost", value)) return LOST;
    if (!look_up(card, figure, value)) return NOT_SUPPORTED;
    return value[0] == '!' ? atoi(value + 1) : OK;
}

static int figures(Device device, const char *figure, unsigned long long *first, unsigned long long *second) {
    char value[128];
    int error = text(device, figure, value);
    if (!error) sscanf(value, "%llu %llu", first, second);
    return error;
}

static int number(Device device, const char *figure, unsigned *value) {
    unsigned long long first = 0, second = 0;
    int error = figures(device, figure, &first, &second);
    *value = (unsigned)first;
    return error;
}

static int numbered(Device device, const char *figure, unsigned long long place, unsigned long long *value) {
    char name[32];
    unsigned long long second;
    sprintf(name, "%s%llu", figure, place);
    return figures(device, name, value, &second);
}

int nvmlInitWithFlags(unsigned flags) {
    char value[128] = "0";
    for (int i = 0; i < 200; i++) numbers[i] = i;
    if (look_up("*", "init", value) && !strcmp(value, "hang")) sleep(60);
    return value[0] == '!' ? atoi(value + 1) : OK;
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int error) { return error == LOST ? "GPU is lost" : "scripted error"; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    char value[128] = "0";
    look_up("*", "cards", value);
    *count = atoi(value);
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    char value[128];
    *device = &numbers[index];
    return text(*device, "lost", value) == LOST ? LOST : OK;
}
int nvmlDeviceGetName(Device device, char *name, unsigned size) { return text(device, "name", name); }
int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    if (!look_up("*", "driver", version)) strcpy(version, "0");
    return OK;
}
int nvmlDeviceGetUUID(Device device, char *uuid, unsigned size) { return text(device, "uuid", uuid); }
int nvmlDeviceGetMaxMigDeviceCount(Device device, unsigned *count) { *count = SLICES; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(Device device, unsigned index, Device *slice) {
    char value[128];
    *slice = &numbers[100 + SLICES * *device + index];
    return text(*slice, "uuid", value) ? NOT_FOUND : OK;
}

int nvmlDeviceGetMemoryInfo(Device device, unsigned long long *total_free_used) {
    return figures(device, "memory", &total_free_used[2], &total_free_used[0]);
}
int nvmlDeviceGetUtilizationRates(Device device, unsigned *gpu_memory) {
    unsigned long long gpu = 0, memory = 0;
    int error = figures(device, "utilization", &gpu, &memory);
    gpu_memory[0] = (unsigned)gpu, gpu_memory[1] = (unsigned)memory;
    return error;
}
int nvmlDeviceGetTemperature(Device device, int sensor, unsigned *celsius) { return number(device, "temperature", celsius); }
int nvmlDeviceGetPowerUsage(Device device, unsigned *milliwatts) { return number(device, "power", milliwatts); }
int nvmlDeviceGetEnforcedPowerLimit(Device device, unsigned *milliwatts) { return number(device, "limit", milliwatts); }
int nvmlDeviceGetTotalEnergyConsumption(Device device, unsigned long long *millijoules) {
    unsigned long long second;
    return figures(device, "energy", millijoules, &second);
}
int nvmlDeviceGetClockInfo(Device device, int type, unsigned *megahertz) {
    unsigned long long value = 0;
    int error = numbered(device, "clock", type, &value);
    *megahertz = (unsigned)value;
    return error;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long *reasons) {
    unsigned long long second;
    return figures(device, "reasons", reasons, &second);
}
int nvmlDeviceGetPcieThroughput(Device device, int direction, unsigned *kilobytes) {
    unsigned long long value = 0;
    int error = numbered(device, "pcie", direction, &value);
    *kilobytes = (unsigned)value;
    return error;
}
int nvmlDeviceGetTotalEccErrors(Device device, int type, int counter, unsigned long long *errors) {
    return numbered(device, "ecc", type, errors);
}

typedef struct { unsigned field, scope; long long time, latency; int type, error; unsigned long long value; } Field;
int nvmlDeviceGetFieldValues(Device device, int count, Field *fields) {
    for (int i = 0; i < count; i++) fields[i].error = numbered(device, "field", fields[i].field, &fields[i].value);
    return OK;
}

typedef struct { unsigned pid; unsigned long long memory; unsigned instance, compute; } Process;
int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, Process *processes) {
    unsigned running = 0;
    int error = number(device, "processes", &running);
    if (error || !running) return *count = 0, error;
    if (*count < running) return *count = running, INSUFFICIENT_SIZE;
    *count = running;
    memset(processes, 0, running * sizeof *processes);
    return OK;
}
