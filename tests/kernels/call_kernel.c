/* Calls one C kernel whose arguments were written to a file by another process, perhaps on another architecture, and
 * writes back what its pointers point to (tests/kernels/emulated.py).
 *
 * The file: name of the function [32], bytes of its structure, number of pointers, the structure, then for each pointer
 * its offset in the structure, its number of bytes and those. All numbers are int64_t. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void linear(void *arguments);
void paged_attention(void *arguments);
void convolve(void *arguments);
void scan(void *arguments);

static const struct {
    const char *name;
    void (*call)(void *arguments);
} KERNELS[] = {{"linear", linear}, {"paged_attention", paged_attention}, {"convolve", convolve}, {"scan", scan}};

static void must(int condition, const char *what) {
    if (condition) return;
    fprintf(stderr, "call_kernel: %s\n", what);
    exit(1);
}

static int64_t number(FILE *file) {
    int64_t value;
    must(fread(&value, sizeof value, 1, file) == 1, "the file ends early");
    return value;
}

static void *bytes(FILE *file, int64_t size) {
    void *data = aligned_alloc(64, (size + 127) / 64 * 64); /* whole vectors may be read past the end */
    must(data && fread(data, 1, size, file) == (size_t)size, "the file ends early");
    return data;
}

int main(int count, char **arguments) {
    must(count == 3, "usage: call_kernel IN OUT");
    FILE *in = fopen(arguments[1], "rb"), *out = fopen(arguments[2], "wb");
    must(in && out, "cannot open the files");
    const char *name = bytes(in, 32);
    int64_t size = number(in), pointers = number(in);
    char *structure = bytes(in, size);
    int64_t *sizes = calloc(pointers, sizeof *sizes);
    void **data = calloc(pointers, sizeof *data);
    for (int64_t i = 0; i < pointers; i++) {
        int64_t offset = number(in);
        sizes[i] = number(in);
        data[i] = bytes(in, sizes[i]);
        memcpy(structure + offset, &data[i], sizeof data[i]);
    }
    size_t kernel = 0, kernels = sizeof KERNELS / sizeof *KERNELS;
    while (kernel < kernels && strcmp(name, KERNELS[kernel].name)) kernel++;
    must(kernel < kernels, "unknown function");
    KERNELS[kernel].call(structure);
    for (int64_t i = 0; i < pointers; i++)
        must(fwrite(data[i], 1, sizes[i], out) == (size_t)sizes[i], "cannot write");
    return fclose(out);
}
