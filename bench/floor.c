/* The floor: what the kernel alone charges for a process in all namespaces that prints one byte.
 *
 * Each round clones a child into new user, mount, pid, net, ipc, uts and cgroup namespaces, maps one uid, execs
 * /bin/echo, and waits for its first byte of output. No limits, no root, no filter: nothing can be faster and isolated.
 * Prints one line of microseconds per round. */
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

static int output[2];
static char stack[1 << 16];

static int child(void *unused)
{
    char *argv[] = {"/bin/echo", "x", NULL}, *environment[] = {NULL};
    dup2(output[1], 1);
    close(output[0]);
    execve(argv[0], argv, environment);
    _exit(127);
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 200;
    for (int round = 0; round < rounds; round++) {
        struct timespec before, after;
        char byte[8];
        if (pipe(output))
            return 1;
        clock_gettime(CLOCK_MONOTONIC, &before);
        pid_t pid = clone(child, stack + sizeof stack,
                          CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS |
                              CLONE_NEWCGROUP | SIGCHLD,
                          NULL);
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
    }
    return 0;
}
