/* The signals of a rank's helper process, such as a worker of a DataLoader.
 *
 * A scheduler may signal every process of a job at once. The rank decides what that means, and it may need its helpers
 * until it has saved. So a helper obeys its own session and its parent alone: the rank leads a session, and its helpers
 * are in it unless they have left it.
 */
#define _GNU_SOURCE
#include "phalanx_shm.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

static int is_loader_worker;

static void on_signal(int number, siginfo_t *info, void *context)
{
    (void)context;
    int before = errno;
    /* 0: a process of another PID namespace. One that has ended already has no session. */
    if (info->si_pid != 0 && (info->si_pid == getppid() || getsid(info->si_pid) == getsid(0))) {
        if (is_loader_worker && number == SIGTERM)
            _exit(0); /* as torch's own handler does: any other exit code is a failure for it */
        signal(number, SIG_DFL);
        raise(number); /* blocked until this handler returns */
    }
    errno = before;
}

static void do_nothing(int number) { (void)number; }

int phx_obey_own_session(int loader_worker)
{
    /* Handlers, not SIG_IGN: a program that the helper executes would inherit that. */
    static const int guarded[] = {SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};
    struct sigaction action, before;
    int failed = 0;
    memset(&action, 0, sizeof action);
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_SIGINFO | SA_RESTART;
    action.sa_sigaction = on_signal;
    is_loader_worker = loader_worker;
    for (unsigned i = 0; i < sizeof guarded / sizeof *guarded; i++) {
        failed |= sigaction(guarded[i], NULL, &before);
        if (loader_worker || before.sa_handler == SIG_DFL)
            failed |= sigaction(guarded[i], &action, NULL);
    }
    if (loader_worker) {
        action.sa_flags = SA_RESTART;
        action.sa_handler = do_nothing;
        failed |= sigaction(SIGINT, &action, NULL);
    }
    return failed;
}
