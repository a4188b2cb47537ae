// Command keyring tells of its own session keyring (keyrings(7)), which no program of busybox can.
//
//	keyring id        prints the serial number and the kernel's description of the session keyring
//	keyring add NAME  puts a key of this name into it
//	keyring has NAME  prints yes or no: can a key of this name be found through it?
package main

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"unsafe"
)

const (
	session    = ^uintptr(2) // KEY_SPEC_SESSION_KEYRING, -3
	getID      = 0           // KEYCTL_GET_KEYRING_ID
	describe   = 6           // KEYCTL_DESCRIBE
	searchRing = 10          // KEYCTL_SEARCH
)

func text(of string) uintptr {
	pointer, err := syscall.BytePtrFromString(of)
	check(err)
	return uintptr(unsafe.Pointer(pointer))
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "keyring:", err)
		os.Exit(1)
	}
}

func call(number uintptr, args ...uintptr) uintptr {
	args = append(args, 0, 0, 0, 0, 0)
	value, _, errno := syscall.Syscall6(number, args[0], args[1], args[2], args[3], args[4], 0)
	if errno != 0 {
		check(errno)
	}
	return value
}

func main() {
	verb, name := os.Args[1], os.Args[len(os.Args)-1]
	switch verb {
	case "id":
		id := call(syscall.SYS_KEYCTL, getID, session, 0)
		buffer := make([]byte, 256)
		length := call(syscall.SYS_KEYCTL, describe, id, uintptr(unsafe.Pointer(&buffer[0])), uintptr(len(buffer)))
		fmt.Println(id, strings.TrimRight(string(buffer[:length]), "\x00"))
	case "add":
		payload := []byte("x")
		call(syscall.SYS_ADD_KEY, text("user"), text(name), uintptr(unsafe.Pointer(&payload[0])), 1, session)
	case "has":
		_, _, errno := syscall.Syscall6(syscall.SYS_KEYCTL, searchRing, session, text("user"), text(name), 0, 0)
		if errno == 0 {
			fmt.Println("yes")
		} else {
			fmt.Println("no")
		}
	}
}
