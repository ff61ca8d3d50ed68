/* Threads of the OpenMP runtime that torch has loaded into the process: a second runtime would compete with it for the
 * cores. Its functions are null if torch has loaded none. */
#ifndef HEADWAY_THREADS_H
#define HEADWAY_THREADS_H

#include <stdint.h>

extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern void GOMP_barrier(void) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));

/* Call `work(data)` on `*threads` threads, which becomes 1 without OpenMP. */
static inline void run_threads(void (*work)(void *), void *data, int64_t *threads) {
    if (!GOMP_parallel) *threads = 1;
    if (*threads > 1)
        GOMP_parallel(work, data, (unsigned)*threads, 0);
    else
        work(data);
}

static inline int64_t this_thread(int64_t threads) { return threads > 1 ? omp_get_thread_num() : 0; }

#endif
