"""What streams of media files share. Open `section` first; it imports nothing of the package but `errors`."""
