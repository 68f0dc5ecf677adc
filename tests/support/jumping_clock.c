/* Preloaded, lets the clock of the day jump ten times a second; the monotonic one stays.

   cc -shared -fPIC -o jumping_clock.so jumping_clock.c -ldl; CLOCK_JUMPS=SEED LD_PRELOAD=... */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static const long JUMPS[] = {0, 5, -5, 3600, -3600, 86400, -86400, 100000000};

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        struct timespec steady;
        const char *seed = getenv("CLOCK_JUMPS");
        real(CLOCK_MONOTONIC, &steady);
        unsigned long tenth = steady.tv_sec * 10ul + steady.tv_nsec / 100000000;
        unsigned long mixed = (tenth + (seed ? atol(seed) : 0)) * 2654435761ul;
        now->tv_sec += JUMPS[(mixed >> 16) % 8];
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *kept) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    if (kept) *kept = fine.tv_sec;
    return fine.tv_sec;
}
