/* The floor: what the kernel alone charges for a process in all namespaces that prints one byte.
 *
 * Each round clones a child into new user, mount, pid, net, ipc, uts and cgroup namespaces, execs /bin/echo, and waits
 * for its first byte of output. No limits, no root, no filter, no id map: nothing can be faster and isolated.
 *
 *     floor 200    200 rounds, one line of microseconds each
 *     floor        one round for each byte of standard input, so that a harness can interleave them with other work
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define NAMESPACES                                                                                                     \
    (CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)

static int output[2];
static char stack[1 << 16];

static int child(void *unused)
{
    char *argv[] = {"/bin/echo", "x", NULL}, *environment[] = {NULL};
    (void)unused;
    dup2(output[1], 1);
    close(output[0]);
    execve(argv[0], argv, environment);
    _exit(127);
}

static int measure(void)
{
    struct timespec before, after;
    char byte[8];
    if (pipe(output))
        return 1;
    clock_gettime(CLOCK_MONOTONIC, &before);
    pid_t pid = clone(child, stack + sizeof stack, NAMESPACES | SIGCHLD, NULL);
    if (pid < 0) {
        perror("clone");
        return 1;
    }
    close(output[1]);
    if (read(output[0], byte, sizeof byte) <= 0)
        return 1;
    clock_gettime(CLOCK_MONOTONIC, &after);
    close(output[0]);
    waitpid(pid, NULL, 0);
    printf("%.1f\n", (after.tv_sec - before.tv_sec) * 1e6 + (after.tv_nsec - before.tv_nsec) / 1e3);
    fflush(stdout);
    return 0;
}

int main(int argc, char **argv)
{
    char byte;
    if (argc == 1) {
        while (read(0, &byte, 1) == 1)
            if (measure())
                return 1;
        return 0;
    }
    for (int rounds = atoi(argv[1]); rounds > 0; rounds--)
        if (measure())
            return 1;
    return 0;
}
