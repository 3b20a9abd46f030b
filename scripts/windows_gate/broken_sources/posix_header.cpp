// expect: 'unistd.h' file not found
#include <unistd.h>
int f() {
    return getpid();
}
